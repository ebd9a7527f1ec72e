"""Kernels of pools whose keys near a query have biases, which is what AFT-local and AFT-conv compute: tile by tile."""
