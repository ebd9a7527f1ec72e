"""Kernelised attention: sums over features, whole and causal, in blocks that stay in cache."""
