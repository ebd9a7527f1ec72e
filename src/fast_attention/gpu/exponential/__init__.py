"""Kernels of features that are exponentials of projected tokens, each with a logarithmic scale of its own."""
