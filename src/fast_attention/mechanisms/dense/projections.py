"""Linformer's projections: how many keys and values become a fixed number of slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fast_attention.mechanism import Shape
from fast_attention.mechanisms.dense import reference
from fast_attention.value import Value

__all__ = ["Convolution", "LearnedProjection", "MaxPool", "MeanPool", "Projection"]

Sharing = Literal["none", "headwise", "key-value", "layerwise"]


class Projections(NamedTuple):
    """Weights from keys to slots and from values to slots, or kernels over both; F is None where E does both."""

    E: Tensor
    F: Tensor | None


class Projection(Value, ABC):
    """Base class of ``Linformer``'s projections: n keys and values (n, E) become ``rank`` slots (rank, E)."""

    learned: ClassVar[bool]
    linear: ClassVar[bool] = True  # in the values, so that a matrix stands for it

    def weights(self, shape: Shape, rank: int) -> Any:
        """Learned projections for ``shape``, or nothing."""
        return ()

    def limit(self, w: Any, rank: int) -> int | None:
        """The most tokens that ``w`` can take; None for any number."""
        return None

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, rank: int, key_mask: Tensor | None) -> Tensor:
        """Attend to the slots."""


@dataclass(frozen=True, repr=False)
class LearnedProjection(Projection):
    """Learned matrices E, F of ``rank`` rows and ``max_len`` columns, drawn uniformly from +-1/sqrt(rank).

    Args:
        sharing: ``"none"``: E and F of its own for every head; ``"headwise"``: one E and one F for all heads;
            ``"key-value"``: one E for keys and values of all heads; ``"layerwise"``: the same, meant to be shared by
            all layers too: build the later ones with ``Bound(..., tied=first)``.
    """

    sharing: Sharing = "none"
    learned = True

    def weights(self, shape: Shape, rank: int) -> Projections:
        """E and F, with a head axis only where heads differ."""
        size = (shape.heads, rank, shape.max_len) if self.sharing == "none" else (rank, shape.max_len)
        two = self.sharing in ("none", "headwise")
        return Projections(_uniform(size, rank), _uniform(size, rank) if two else None)

    def limit(self, w: Projections, rank: int) -> int:
        """Columns of E."""
        return w.E.shape[-1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Projections, rank: int, key_mask: Tensor | None) -> Tensor:
        """Attend as published."""
        return reference.linformer_attention(q, k, v, w.E, w.F, key_mask=key_mask)


@dataclass(frozen=True, repr=False)
class MeanPool(Projection):
    """The mean of neighbouring tokens: ``rank`` slots over the tokens at hand, nothing to learn, any length."""

    learned = False
    pool = staticmethod(reference.pool_mean)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], rank: int, key_mask: Tensor | None) -> Tensor:
        """Attend to pools."""
        return reference.pooled_attention(q, k, v, rank=rank, pool=self.pool, key_mask=key_mask)


@dataclass(frozen=True, repr=False)
class MaxPool(MeanPool):
    """The maximum of neighbouring tokens, channel by channel: as ``MeanPool`` otherwise."""

    linear = False
    pool = staticmethod(reference.pool_max)


@dataclass(frozen=True, repr=False)
class Convolution(Projection):
    """Learned kernels per head, as long as their stride of ceil(max_len / rank) tokens: at most ``rank`` slots."""

    learned = True

    def weights(self, shape: Shape, rank: int) -> Projections:
        """One kernel for keys and one for values per head."""
        stride = -(-shape.max_len // rank)
        return Projections(_uniform((shape.heads, stride), stride), _uniform((shape.heads, stride), stride))

    def limit(self, w: Projections, rank: int) -> int:
        """Limit the rank to as many strides as slots."""
        return rank * w.E.shape[-1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Projections, rank: int, key_mask: Tensor | None) -> Tensor:
        """Attend to one weighted sum for every stride."""
        assert w.F is not None
        return reference.convolved_attention(q, k, v, w.E, w.F, key_mask=key_mask)


def _uniform(size: tuple[int, ...], fan: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size).uniform_(-(fan**-0.5), fan**-0.5))
