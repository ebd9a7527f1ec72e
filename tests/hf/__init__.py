"""Exact speed-ups for models of transformers, family by family."""
