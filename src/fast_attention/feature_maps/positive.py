"""Positivity: maps z to h(z) > 0 whose logarithm is taken without ever forming h where that would lose digits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.numerics import at_most, no_less
from fast_attention.feature_maps.features import Features
from fast_attention.value import Value, at_least

EXACT = 40.0  # softplus(z) = z from here on, even in float64
LEAST = 1e-30  # an eps from here on keeps h a normal number in float32, so that its logarithm may be taken as it is


class Positive(Value, ABC):
    """A map h(z) > 0, channel by channel, with its logarithm; what log and Manhattan attention make keys positive with.

    To use your own, subclass it as a ``@dataclass(frozen=True, repr=False)`` with ``__call__`` and ``log``.
    """

    @abstractmethod
    def __call__(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """``h(z)``."""

    @abstractmethod
    def log(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """``log h(z)``, finite for every finite z."""

    def log1p(self, z: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """``log(1 + h(z))``, positive and finite for every finite z."""
        return torch.log1p(self(z))

    def value_and_log(self, z: Float[Tensor, "..."]) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """``h(z)`` and ``log h(z)``."""
        return self(z), self.log(z)

    def features(self, z: Float[Tensor, "*batch n d"]) -> Features:
        """``h(z)`` as the feature map of linear attention."""
        return Features(self(z))


@dataclass(frozen=True, repr=False)
class PositiveSoftplus(Positive):
    """``h = log(1 + e^z) + eps``: h ~ z above, e^z below; d log h / dz lies in (0, 1].

    Args:
        eps: Added to h, at least 0. It bounds log h from below by log(eps), -13.8 for 1e-6; with 0 the logarithm goes
            on as z itself.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        at_least(self, "eps", self.eps, 0.0)

    def __call__(self, z: Tensor) -> Tensor:
        """``log(1 + e^z) + eps``."""
        return F.softplus(z, threshold=EXACT) + self.eps

    def value_and_log(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``h`` and ``log h`` from one softplus."""
        h = self(z)
        return h, h.log() if self.eps >= LEAST else self.log(z)

    def log(self, z: Tensor) -> Tensor:
        """``log h``; below -15, should eps not keep h above zero, from the series ``z - e^z / 2``."""
        if self.eps >= LEAST:
            return self(z).log()
        low = z < -15.0
        plain = F.softplus(z.masked_fill(low, 0.0), threshold=EXACT).log()
        series = z - 0.5 * at_most(z, -15.0).exp()
        logs = torch.where(low, series, plain)
        return torch.logaddexp(logs, torch.full_like(logs, math.log(self.eps))) if self.eps else logs


@dataclass(frozen=True, repr=False)
class PositiveExp(Positive):
    """``h = e^z``, so that ``log h = z`` exactly: the keys are the logarithms.

    Args:
        limit: Where h itself is needed (not its logarithm), z is cut off here, so that h stays finite.
    """

    limit: float = 15.0

    def __call__(self, z: Tensor) -> Tensor:
        """``e^min(z, limit)``."""
        return at_most(z, self.limit).exp()

    def log(self, z: Tensor) -> Tensor:
        """``z``."""
        return z

    def log1p(self, z: Tensor) -> Tensor:
        """``log(1 + e^z)``, not cut off."""
        return F.softplus(z, threshold=EXACT)


@dataclass(frozen=True, repr=False)
class PositiveElu(Positive):
    """``h = elu(z) + 1``: z + 1 above zero, e^z below, as in linear attention."""

    def __call__(self, z: Tensor) -> Tensor:
        """``elu(z) + 1``."""
        return torch.where(z < 0, at_most(z, 0.0).exp(), z + 1)

    def log(self, z: Tensor) -> Tensor:
        """``log(1 + z)`` above zero, z below."""
        return torch.where(z < 0, z, no_less(z, 0.0).log1p())


@dataclass(frozen=True, repr=False)
class PositiveRelu(Positive):
    """``h = max(z, 0) + eps``. Below zero the gradient is dead and log h sits at log(eps): other maps learn better.

    Args:
        eps: Added to h, above 0.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        at_least(self, "eps", self.eps, LEAST)  # log h has to be finite

    def __call__(self, z: Tensor) -> Tensor:
        """``max(z, 0) + eps``."""
        return z.relu() + self.eps

    def log(self, z: Tensor) -> Tensor:
        """``log(max(z, 0) + eps)``."""
        return (z.relu() + self.eps).log()
