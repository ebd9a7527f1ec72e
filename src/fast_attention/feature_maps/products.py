"""Feature maps whose features are products of a token's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fast_attention.engine.bounds import bounded
from fast_attention.feature_maps.feature_map import FeatureMap
from fast_attention.value import at_least


@dataclass(frozen=True, repr=False)
class Quadratic(FeatureMap):
    """The kernel ``(1 + x . y / sqrt(d))^2``; C = 1 + d + d^2, never negative as a kernel, exact."""

    def __call__(self, x: Tensor) -> Tensor:
        """``[1, sqrt(2) x, vec(x x^T)]`` of ``x / d^(1/4)``."""
        return _polynomial(x, math.sqrt(2), 1.0)


@dataclass(frozen=True, repr=False)
class Taylor(FeatureMap):
    """The kernel ``1 + s + s^2 / 2``, s = x . y / sqrt(d): exp to second order, at least 1/2; C = 1 + d + d^2.

    The feature map of Based (Arora et al. 2024, arXiv 2402.18668).
    """

    def __call__(self, x: Tensor) -> Tensor:
        """``[1, x, vec(x x^T) / sqrt(2)]`` of ``x / d^(1/4)``."""
        return _polynomial(x, 1.0, math.sqrt(0.5))


@dataclass(frozen=True, repr=False)
class DPFP(FeatureMap):
    """Products of neighbours in ``[max(x, 0), max(-x, 0)]``: sparse, never negative, C = 2 d nu.

    Signs say which features are above zero, so that keys of different signs share few of them, and a state holds more
    keys apart than with d features (deterministic parameter-free projection, Schlag et al. 2021, arXiv 2102.11174).

    Args:
        nu: Each number is multiplied by the next, the one after it, up to the ``nu``-th; less than twice the width.
    """

    nu: int = 1

    def __post_init__(self) -> None:
        at_least(self, "nu", self.nu, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """``r_i r_(i + j)`` for j = 1 to ``nu``, around the end of ``r``, which holds both halves.

        Raises:
            ValueError: ``nu`` is not less than twice the width.
        """
        if self.nu >= 2 * x.shape[-1]:
            raise ValueError(f"{self!r}: nu must be less than twice the width of a token, here {2 * x.shape[-1]}")
        x = bounded(x)
        halves = torch.cat([x.relu(), (-x).relu()], -1)
        return torch.cat([halves * halves.roll(-j, -1) for j in range(1, self.nu + 1)], -1)


def _polynomial(x: Tensor, first: float, second: float) -> Tensor:
    x = bounded(x) * x.shape[-1] ** -0.25
    squares = (second * x[..., :, None] * x[..., None, :]).flatten(-2)
    return torch.cat([torch.ones_like(x[..., :1]), first * x, squares], -1)
