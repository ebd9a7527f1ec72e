"""Attention-free transformers: keys weighed by position, channel by channel."""
