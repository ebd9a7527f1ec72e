"""Attention maps of a model's heads as they are, beside those of a mechanism in their place."""
