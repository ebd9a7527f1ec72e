"""Transformer-XL's relative positions (Dai et al. 2019, arXiv 1901.02860): queries meet a vector of every distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fast_attention.biases.bias import Bias, dtype_of
from fast_attention.engine.offsets import Terms
from fast_attention.traits import Shape
from fast_attention.value import at_least


class RelativeWeights(NamedTuple):
    """What every head adds to its queries, before keys and before distances, and its map of the sinusoids."""

    u: Float[Tensor, "heads head_dim"]
    v: Float[Tensor, "heads head_dim"]
    projection: Float[Tensor, "heads width head_dim"]


def sinusoids(distance: Int[Tensor, "n"], width: int, dtype: torch.dtype) -> Float[Tensor, "n width"]:
    """Sines of a distance at falling frequencies, then cosines, as Transformer-XL's code lays them out."""
    half = (width + 1) // 2
    frequency = torch.exp(torch.arange(half, dtype=dtype, device=distance.device) * (-2.0 * math.log(1e4) / width))
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)[:, :width]


@dataclass(frozen=True, repr=False)
class TransformerXL(Bias):
    """Scores ``((q_i + u) . k_j + (q_i + v) . R_{i-j}) / sqrt(d)`` (arXiv 1901.02860, section 3.3).

    ``R_{i-j}`` is a vector of sinusoids of the distance, mapped to each head by a matrix that is learned, and so are u
    and v of each head. In a window a query meets as many of these vectors as keys. Rotary positions would turn queries
    away from them: give none.

    Args:
        width: Sinusoids of a distance; in the paper as many as a token is wide.
    """

    width: int = 256

    paper = "Dai et al. 2019, arXiv 1901.02860"
    formula = "(u . k_j + (q_i + v) . R_{i-j}) / sqrt(d)"
    learned = True
    rotary = False

    def __post_init__(self) -> None:
        """Check the settings."""
        at_least(self, "width", self.width, 1)

    def weights(self, shape: Shape) -> RelativeWeights:
        """Zeros for u and v, and a random projection that keeps lengths."""
        projection = torch.randn(shape.heads, self.width, shape.head_dim) * self.width**-0.5
        u, v = (nn.Parameter(torch.zeros(shape.heads, shape.head_dim)) for _ in range(2))
        return RelativeWeights(u, v, nn.Parameter(projection))

    def queries(self, q: Tensor, w: RelativeWeights) -> Tensor:
        """``q + u``, which keys meet."""
        return q + w.u[:, None].to(q.dtype)

    def terms(self, offsets: Int[Tensor, "offsets"], w: RelativeWeights, like: Tensor, *, scale: float) -> Terms:
        """R as vectors that ``q + u`` meets, and as numbers what ``v - u`` gives with them."""
        dtype = dtype_of(like)
        u, v, projection = (x.to(dtype) for x in w)
        vectors = sinusoids(-offsets, self.width, dtype) @ projection
        return Terms(scale * (vectors @ (v - u)[..., None])[..., 0], vectors)
