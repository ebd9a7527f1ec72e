"""Linformer (Wang et al. 2020): n keys and values are projected to k slots, and the queries attend to the slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.dense.slots import (
    convolved_attention,
    linformer_attention,
    pool_max,
    pool_mean,
    pooled_attention,
)
from fast_attention.value import Value, at_least, one_of

Sharing = Literal["none", "headwise", "key-value", "layerwise"]


class Projections(NamedTuple):
    """From keys to slots and from values to slots; F is None where E does both."""

    E: Tensor
    F: Tensor | None


class Kernels(NamedTuple):
    """For every head one kernel over keys and one over values, (H, stride) each."""

    E: Tensor
    F: Tensor


class Projection(Value, ABC):
    """How keys and values become slots."""

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
        """Attention to the slots."""


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

    def __post_init__(self) -> None:
        one_of(self, "sharing", self.sharing, Sharing)

    def weights(self, shape: Shape, rank: int) -> Projections:
        """E and F, with a head axis only where heads differ."""
        size = (shape.heads, rank, shape.max_len) if self.sharing == "none" else (rank, shape.max_len)
        two = self.sharing in ("none", "headwise")
        return Projections(_uniform(size, rank), _uniform(size, rank) if two else None)

    def limit(self, w: Projections, rank: int) -> int:
        """Columns of E."""
        return w.E.shape[-1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Projections, rank: int, key_mask: Tensor | None) -> Tensor:
        """Linformer as published."""
        return linformer_attention(q, k, v, w.E, w.F, key_mask=key_mask)


@dataclass(frozen=True, repr=False)
class MeanPool(Projection):
    """The mean of neighbouring tokens: ``rank`` slots over the tokens at hand, nothing to learn, any length."""

    learned = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], rank: int, key_mask: Tensor | None) -> Tensor:
        """Attention to means."""
        return pooled_attention(q, k, v, rank=rank, pool=pool_mean, key_mask=key_mask)


@dataclass(frozen=True, repr=False)
class MaxPool(Projection):
    """The maximum of neighbouring tokens, channel by channel: as ``MeanPool`` otherwise."""

    learned = False
    linear = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], rank: int, key_mask: Tensor | None) -> Tensor:
        """Attention to maxima."""
        return pooled_attention(q, k, v, rank=rank, pool=pool_max, key_mask=key_mask)


@dataclass(frozen=True, repr=False)
class Convolution(Projection):
    """Learned kernels per head, as long as their stride of ceil(max_len / rank) tokens: at most ``rank`` slots."""

    learned = True

    def weights(self, shape: Shape, rank: int) -> Kernels:
        """One kernel for keys and one for values per head."""
        stride = -(-shape.max_len // rank)
        return Kernels(_uniform((shape.heads, stride), stride), _uniform((shape.heads, stride), stride))

    def limit(self, w: Kernels, rank: int) -> int:
        """As many strides as slots."""
        return rank * w.E.shape[-1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Kernels, rank: int, key_mask: Tensor | None) -> Tensor:
        """Attention to what the kernels make of every stride."""
        return convolved_attention(q, k, v, w.E, w.F, key_mask=key_mask)


def _uniform(size: tuple[int, ...], fan: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size).uniform_(-(fan**-0.5), fan**-0.5))


@dataclass(frozen=True, repr=False)
class Linformer(Attention[Any, tuple[()]]):
    """Attention to ``rank`` slots that stand for all tokens; cannot be causal, since every slot holds the future.

    Args:
        rank: Number of slots k. The paper reaches near parity with 128 at 512 tokens and 256 at 1024.
        projection: ``LearnedProjection()`` (the paper's), ``MeanPool()``, ``MaxPool()`` or ``Convolution()``. Only
            the pools, which learn nothing, take any length.
    """

    rank: int = 256
    projection: Projection = LearnedProjection()

    def __post_init__(self) -> None:
        at_least(self, "rank", self.rank, 1)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Bounded and learned, or any length and an approximation of softmax, by the projection."""
        learned = self.projection.learned
        return Traits(
            paper="Wang et al. 2020, arXiv 2006.04768",
            formula="softmax(q (E k)^T / sqrt(d)) (F v)",
            cost="n r d",
            order=1.0,
            padding=True,
            cross=True,
            bounded=learned,
            learned=learned,
            matrix=self.projection.linear,
            approximates=None if learned else "Softmax",
        )

    @property
    def needs_weights(self) -> bool:
        """Only where the projection is learned."""
        return self.projection.learned

    def weights(self, shape: Shape) -> Any:
        """What the projection learns."""
        return self.projection.weights(shape, self.rank)

    def heads_of(self, w: Any) -> int | None:
        """The first axis, unless E is shared by all heads."""
        return None if getattr(self.projection, "sharing", "none") != "none" else super().heads_of(w)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Attention to the slots of the keys at hand."""
        limit = self.projection.limit(w, self.rank)
        if limit is not None:
            self.within(k.shape[-2], limit)
        return self.projection.attend(q, k, v, w, self.rank, key_mask)
