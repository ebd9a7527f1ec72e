"""T5's relative positions (Raffel et al. 2019, arXiv 1910.10683): a learned number for each bucket of distances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fast_attention.biases.bias import Bias
from fast_attention.engine.offsets import Terms
from fast_attention.traits import Shape
from fast_attention.value import at_least


class BucketWeights(NamedTuple):
    """A number for each head and bucket."""

    table: Float[Tensor, "heads buckets"]


def t5_buckets(
    offsets: Int[Tensor, "*sizes"], *, num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Tensor, "*sizes"]:
    """The bucket of every offset j - i, as T5's code has it.

    Half of the buckets (of one direction) are for one distance each; the others widen by the logarithm up to
    ``max_distance``, and the last is for all beyond. One direction: later keys share the bucket of distance 0.
    """
    later = torch.zeros_like(offsets)
    if bidirectional:
        num_buckets //= 2
        later, distance = (offsets > 0).long() * num_buckets, offsets.abs()
    else:
        distance = (-offsets).clamp(min=0)
    exact = num_buckets // 2
    steps = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact) * (num_buckets - exact)
    wide = (exact + steps.long()).clamp(max=num_buckets - 1)
    return later + torch.where(distance < exact, distance, wide)


@dataclass(frozen=True, repr=False)
class T5Buckets(Bias):
    """T5's relative position bias: a learned number for each head and bucket of distances.

    Args:
        num_buckets: Buckets of all distances, of both directions together.
        max_distance: From this distance on all share one bucket.
        bidirectional: Whether later keys have buckets of their own; False in T5's decoder.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    paper = "Raffel et al. 2019, arXiv 1910.10683"
    formula = "table_h[bucket(j - i)]"
    learned = True

    def __post_init__(self) -> None:
        """Check the settings."""
        least = 4 if self.bidirectional else 2
        at_least(self, "num_buckets", self.num_buckets, least)
        at_least(self, "max_distance", self.max_distance, self.num_buckets // least + 1)

    def weights(self, shape: Shape) -> BucketWeights:
        """A small random number for each head and bucket, as T5 begins."""
        return BucketWeights(nn.Parameter(torch.randn(shape.heads, self.num_buckets) * shape.width**-0.5))

    def terms(self, offsets: Int[Tensor, "offsets"], w: BucketWeights, like: Tensor, *, scale: float) -> Terms:
        """The table's numbers; they are added to scores as they are, after ``scale``."""
        buckets = t5_buckets(
            offsets, num_buckets=self.num_buckets, max_distance=self.max_distance, bidirectional=self.bidirectional
        )
        return Terms(w.table.index_select(1, buckets))
