"""FAVOR and FAVOR+ in blocks: features made where they are read."""
