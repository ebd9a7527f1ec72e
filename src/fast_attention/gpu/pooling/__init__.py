"""Kernels of softmax pooling channel by channel, which is what AFT-simple computes: one program walks some tokens."""
