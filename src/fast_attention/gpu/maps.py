"""The elementwise feature maps that kernels compute themselves, by number; any other comes as features already."""

from __future__ import annotations

from fast_attention.engine import scan

NONE, IDENTITY, ELU, RELU = -1, 0, 1, 2
EXPONENTIAL = 3  # of projected tokens: no elementwise map, and each feature has a scale of its own
FLOOR = scan.FLOOR  # the logarithm of nothing
SMALLEST = 2.0**-103  # a denominator below it is none: float32's least normal number over its eps
