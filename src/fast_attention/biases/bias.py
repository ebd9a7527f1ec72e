"""Position biases: values that say what the scores of a query and a key gain by their distance."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fast_attention.biases.sinks import SinksMixin
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.traits import Shape
from fast_attention.value import Value, at_least


class Bias(Value, ABC):
    """A position bias: a number for each offset ``j - i`` of key j and query i, which stands at i + S - L of S keys.

    To use your own, subclass it as a ``@dataclass(frozen=True, repr=False)`` with ``terms``; one with weights says
    ``learned`` and has them made by ``weights``.
    """

    paper: ClassVar[str]
    formula: ClassVar[str]
    learned: ClassVar[bool] = False  # it has parameters to train
    rotary: ClassVar[bool] = True  # with rotary positions, too, scores depend on the distance alone

    def weights(self, shape: Shape) -> Any:
        """Fresh weights: a NamedTuple of parameters, the first of which has the heads as its first axis, or ``()``."""
        return ()

    def queries(self, q: Tensor, w: Any) -> Tensor:
        """The queries (..., H, L, E) that keys and vectors meet."""
        return q

    def of_heads(self, first: int, number: int, heads: int) -> Bias:
        """The bias of ``number`` heads from ``first`` on, of ``heads``, whose weights are these heads' own."""
        return self

    @abstractmethod
    def terms(self, offsets: Int[Tensor, "offsets"], w: Any, like: Tensor, *, scale: float) -> Terms:
        """The terms (H, offsets) of these offsets for the heads of ``like`` (..., H, L, E), differentiable."""


class BiasMixin(SinksMixin):
    """Adds ``bias`` and ``sinks`` to the settings of a mechanism of softmax: its weights are theirs, and its traits
    depend on them.

    A subclass is a frozen dataclass with the fields ``bias`` and ``sinks``, and gives its traits as ``base_traits``.
    """

    bias: Bias | None

    def positions(self, q: Tensor, w: Any, scale: float | None) -> tuple[Tensor, Positions | None]:
        """The queries that keys meet, and the terms of offsets; as they came and None without a bias."""
        if self.bias is None:
            return q, None
        factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
        w = w.bias if self.sinks else w
        return self.bias.queries(q, w), functools.partial(self.bias.terms, w=w, like=q, scale=factor)


def dtype_of(like: Tensor) -> torch.dtype:
    """The dtype of terms that are computed for ``like``: float32 or better."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of ``heads`` heads, from the steepest on (arXiv 2108.12409, section 3).

    Of a power of two: ``2^(-8 (h + 1) / heads)``. Of another number: those of the next lower power of two, then every
    second one of twice as many, as the authors' code has it.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(heads - power)]


@dataclass(frozen=True, repr=False)
class ALiBi(Bias):
    """Attention with linear biases: ``-m_h |i - j|``, fixed; no position is given to the model in another way.

    The paper has it causal, where ``i - j`` is never negative. Without causal order the distance counts on both sides
    alike, as BERT-like models with ALiBi have it.

    Args:
        slopes: The m_h, one for each head; None for the paper's, for any number of heads.
    """

    slopes: tuple[float, ...] | None = None

    paper = "Press et al. 2021, arXiv 2108.12409"
    formula = "-m_h |i - j|"

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.slopes is not None and not self.slopes:
            raise ValueError("ALiBi(slopes=()): slopes are one number for each head, or None for the paper's")

    def terms(self, offsets: Int[Tensor, "offsets"], w: tuple[()], like: Tensor, *, scale: float) -> Terms:
        """Equal numbers for an offset and its negative.

        Raises:
            ValueError: There are slopes for another number of heads.
        """
        heads = like.shape[-3]
        if self.slopes is not None and len(self.slopes) != heads:
            raise ValueError(f"{self!r}: these are slopes of {len(self.slopes)} heads, and q has {heads}")
        slopes = alibi_slopes(heads) if self.slopes is None else self.slopes
        slopes = torch.tensor(slopes, dtype=dtype_of(like), device=offsets.device)
        return Terms(-slopes[:, None] * offsets.abs())

    def of_heads(self, first: int, number: int, heads: int) -> ALiBi:
        """That of ``number`` heads from ``first`` on, of ``heads``."""
        slopes = tuple(alibi_slopes(heads)) if self.slopes is None else self.slopes
        return ALiBi(slopes[first : first + number])


class BucketWeights(NamedTuple):
    """Weights of ``T5Buckets``: ``table`` (heads, buckets) holds what a score gains in each bucket of offsets."""

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


class RelativeWeights(NamedTuple):
    """Vectors that every head adds to its queries, before keys and before distances, and its map of the sinusoids."""

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
