"""Kernelised attention of linear cost: LinearAttention, the FAVOR family and learned feature maps."""
