"""Published implementations beside ours: adapters for ``fast-attention bench --vs-peers``."""
