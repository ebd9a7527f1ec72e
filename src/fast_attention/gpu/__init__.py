"""Triton kernels for NVIDIA GPUs: the twin of the engine that scans chunks; imported where a call needs it."""
