"""The elementwise feature maps that kernels compute themselves, by number; any other comes as features already."""

from __future__ import annotations

from fast_attention.engine import scan
from fast_attention.feature_maps.feature_map import Elementwise
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu

NONE, IDENTITY, ELU, RELU = -1, 0, 1, 2
FLOOR = scan.FLOOR  # the logarithm of nothing
SMALLEST = 2.0**-103  # a denominator below it is none: float32's least normal number over its eps


def code(phi: Elementwise) -> tuple[int, float] | None:
    """The number and offset of a map; None where kernels have none for it."""
    if isinstance(phi, Relu):
        return RELU, phi.offset
    if isinstance(phi, EluPlusOne):
        return ELU, 0.0
    return (IDENTITY, 0.0) if isinstance(phi, Identity) else None
