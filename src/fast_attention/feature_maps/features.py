"""Feature maps: a kernel k(x, y) = phi(x) . phi(y) as a value that turns (..., n, d) into (..., n, C)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.numerics import clamp
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap, Logs
from fast_attention.feature_maps.feature_map import Features as Features
from fast_attention.value import at_least


@dataclass(frozen=True, repr=False)
class EluPlusOne(Elementwise):
    """``elu(x) + 1``: x + 1 above zero, e^x below; C = d, positive (Katharopoulos et al. 2020, Eq. 7)."""

    def __call__(self, x: Tensor) -> Tensor:
        """``elu(x) + 1``."""
        return F.elu(x).add_(1.0)


@dataclass(frozen=True, repr=False)
class Relu(Elementwise):
    """``max(x, 0) + offset``; C = d, never negative.

    Args:
        offset: Added to every feature, at least 0. 1e-3 makes linear attention the Performer's generalised attention
            without projection. With 0, a query whose features are all zero gets zeros.
    """

    offset: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, "offset", self.offset, 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        """``max(x, 0) + offset``."""
        return x.relu() + self.offset if self.offset else x.relu()


@dataclass(frozen=True, repr=False)
class Identity(Elementwise):
    """``x`` itself; C = d. The denominators ``q . sum k`` can be zero or negative: meant for non-negative inputs."""

    signed: ClassVar[bool] = True

    def __call__(self, x: Tensor) -> Tensor:
        """``x``."""
        return x


@dataclass(frozen=True, repr=False)
class SoftmaxMap(FeatureMap):
    """Softmax over the features of each token; C = d, positive, rows sum to 1.

    Efficient attention (Shen et al. 2018) differs: there the keys are normalised over the sequence.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """``softmax(x)`` over the last axis."""
        return x.softmax(-1)


@dataclass(frozen=True, repr=False)
class Exp(FeatureMap):
    """``exp(x)``; C = d, positive. Its logarithm is kept, so that no input overflows or vanishes."""

    def __call__(self, x: Tensor) -> Tensor:
        """``exp(x)``."""
        return x.exp()

    def features(self, x: Tensor) -> Logs:
        """``x`` itself, within what sums of logarithms can tell from no key at all."""
        return Logs(x.clamp(-1e29, 1e29))


@dataclass(frozen=True, repr=False)
class Custom(FeatureMap):
    """Any function of a tensor as a feature map.

    It compares by the identity of the function and prints its name; that text cannot be parsed back, and a function
    defined inside another one cannot be pickled. Subclass ``FeatureMap`` for a map that can be spelt.

    Args:
        function: From (..., n, d) to (..., n, C), row by row. It should never be negative: the attention weights are
            its dot products. Parameters inside it are not found by ``nn.Module``.
    """

    function: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"Custom(function={self.function!r}): function must be callable on a tensor")

    def __call__(self, x: Tensor) -> Tensor:
        """``function(x)``."""
        return self.function(x)

    def __repr__(self) -> str:
        """The function by its full name."""
        function: Any = self.function
        name = getattr(function, "__qualname__", None) or repr(function)
        return f"Custom({getattr(function, '__module__', None) or 'torch'}.{name})"


def as_feature_map(owner: object, setting: str, value: Any) -> FeatureMap:
    """``value``, wrapped in ``Custom`` where it is a plain function.

    Raises:
        ValueError: It is neither a feature map nor callable, or a class instead of a value.
    """
    if isinstance(value, FeatureMap):
        return value
    if isinstance(value, type) or not callable(value):
        example = f"{value.__name__}()" if isinstance(value, type) else "EluPlusOne()"
        raise ValueError(
            f"{type(owner).__name__}({setting}={value!r}): {setting} must be a feature map such as {example}, "
            "or a function of a tensor"
        )
    function: Any = value
    return Custom(function)


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
        x = clamp(x)
        halves = torch.cat([x.relu(), (-x).relu()], -1)
        return torch.cat([halves * halves.roll(-j, -1) for j in range(1, self.nu + 1)], -1)


def _polynomial(x: Tensor, first: float, second: float) -> Tensor:
    x = clamp(x) * x.shape[-1] ** -0.25
    squares = (second * x[..., :, None] * x[..., None, :]).flatten(-2)
    return torch.cat([torch.ones_like(x[..., :1]), first * x, squares], -1)


__all__ = [
    "DPFP", "Custom", "EluPlusOne", "Exp", "FeatureMap", "Identity", "Quadratic", "Relu", "SoftmaxMap", "Taylor",
    "as_feature_map",
]  # fmt: skip
