"""Linformer (Wang et al. 2020): n keys and values are projected to k slots, and the queries attend to the slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.dense.projections import LearnedProjection, Projection
from fast_attention.traits import FUSED
from fast_attention.value import at_least


@dataclass(frozen=True, repr=False)
class Linformer(Attention[Any, tuple[()]]):
    """Attention to ``rank`` slots that stand for all tokens; cannot be causal, since every slot depends on the future.

    Args:
        rank: Number of slots k. The paper reaches near parity with 128 at 512 tokens and 256 at 1024.
        projection: ``LearnedProjection()`` (the paper's), ``MeanPool()``, ``MaxPool()`` or ``Convolution()``. Only
            the pools, which learn nothing, take any length.
    """

    rank: int = 256
    projection: Projection = LearnedProjection()  # noqa: RUF009

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
            complexity_exponent=1.0,
            gpu=FUSED,
            padding=True,
            cross=True,
            positions="absolute",
            needs_max_len=learned,
            learned=learned,
            matrix=self.projection.linear,
            approximates=None if learned else "Softmax",
        )

    @property
    def needs_weights(self) -> bool:
        """Only where the projection is learned."""
        return self.projection.learned

    def weights(self, shape: Shape) -> Any:
        """Fresh weights of the projection."""
        return self.projection.weights(shape, self.rank)

    def heads_of(self, w: Any) -> int | None:
        """The first axis, unless E is shared by all heads."""
        return None if getattr(self.projection, "sharing", "none") != "none" else super().heads_of(w)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Project keys and values to slots and attend to them."""
        limit = self.projection.limit(w, self.rank)
        if limit is not None:
            self.within(k.shape[-2], limit)
        return self.projection.attend(q, k, v, w, self.rank, key_mask)
