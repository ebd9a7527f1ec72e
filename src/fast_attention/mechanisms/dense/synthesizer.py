"""Synthesizer (Tay et al. 2020): attention scores that no key takes part in, learned or drawn instead."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fast_attention.engine.blocks import narrow
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.precision import in_float32
from fast_attention.mechanism import MaskedAttention, Shape, Traits
from fast_attention.mechanisms.dense import synthesis
from fast_attention.mechanisms.dense.scores import Scores, mixed
from fast_attention.value import Value, at_least

_TABLE = Traits(
    paper="Tay et al. 2020, arXiv 2005.00743", formula="softmax(R) v", cost="n^2 d", order=2.0, reads="v",
    causal=True, padding=True, cross=True, mask=True, memory="growing", bounded=True, learned=True,
)  # fmt: skip
_DENSE = replace(_TABLE, formula="softmax(relu(q_i) W + b) v", reads="qv", cross=False)


class _Synthesizer(MaskedAttention[Any, KVCache]):
    @abstractmethod
    def scores(self, q: Tensor, k: Tensor, w: Any, *, first: int, keys: int) -> Scores:
        """Scores of the queries at positions ``first`` and on, one set for all sequences where q takes no part."""

    @in_float32
    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, *,
        is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Softmax of the scores under any mask, times the values."""
        scores = self.scores(q, k, w, first=0, keys=v.shape[-2])
        return synthesis.attend(v, scores, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: KVCache | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Append the new tokens to the cached values (and keys, where they are read) and weigh all of them."""
        state = append(state, k if self.traits.reads == "qkv" else k[..., :0], v, key_mask)
        keys = state.v.shape[-2]
        scores = self.scores(q, state.k, w, first=keys - q.shape[-2], keys=keys)
        return synthesis.attend(state.v, scores, is_causal=True, key_mask=state.visible), state


@dataclass(frozen=True, repr=False)
class DenseSynthesizer(_Synthesizer):
    """A small network tells from each query alone which positions it attends to."""

    traits = _DENSE

    def weights(self, shape: Shape) -> synthesis.Layer:
        """The layer after the projection to q, one output per position."""
        return synthesis.layer(shape.heads, shape.head_dim, shape.max_len)

    @in_float32
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Attend to the columns of the layer as keys, where torch's kernel takes that; else a block at a time."""
        self.within(v.shape[-2], w.b.shape[-1])
        return synthesis.dense_attention(q, v, w, is_causal=is_causal, key_mask=key_mask)

    def scores(self, q: Tensor, k: Tensor, w: synthesis.Layer, *, first: int, keys: int) -> Scores:
        """One row per token."""
        self.within(keys, w.b.shape[-1])
        return synthesis.dense_scores(q, w, keys)


@dataclass(frozen=True, repr=False)
class FactorizedDenseSynthesizer(_Synthesizer):
    """The dense Synthesizer with rows that are outer products of two short ones: fewer weights, same work.

    Args:
        factor: Length a of the first; the second has ceil(max_len / a). None: the whole number next to sqrt(max_len).
    """

    factor: int | None = None

    traits = replace(_DENSE, formula="softmax(A_i,(j // b) B_i,(j mod b)) v, A = relu(q) W_A + b_A, B alike")

    def __post_init__(self) -> None:
        at_least(self, "factor", 1 if self.factor is None else self.factor, 1)

    def weights(self, shape: Shape) -> synthesis.LayerPair:
        """The two layers after the projection to q."""
        a = self.factor or max(round(shape.max_len**0.5), 1)
        sizes = (a, -(-shape.max_len // a))
        return synthesis.LayerPair(*(synthesis.layer(shape.heads, shape.head_dim, size) for size in sizes))

    def scores(self, q: Tensor, k: Tensor, w: synthesis.LayerPair, *, first: int, keys: int) -> Scores:
        """One row per token, out of two."""
        self.within(keys, w.A.b.shape[-1] * w.B.b.shape[-1])
        return synthesis.outer_scores(q, w)


@dataclass(frozen=True, repr=False)
class RandomSynthesizer(_Synthesizer):
    """One table of scores for all inputs, standard normal at the start. Query i of any sequence has row i.

    Args:
        trainable: Learn the table; False keeps it as drawn.
    """

    trainable: bool = True

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Learned, or drawn and kept."""
        return replace(_TABLE, learned=self.trainable, random=not self.trainable)

    def weights(self, shape: Shape) -> synthesis.Table:
        """The table, per head."""
        R = synthesis.normal(shape.heads, shape.max_len, shape.max_len)
        return synthesis.Table(R if self.trainable else R.detach())

    def scores(self, q: Tensor, k: Tensor, w: synthesis.Table, *, first: int, keys: int) -> Scores:
        """Rows of the table for these queries, columns for these keys."""
        self.within(max(first + q.shape[-2], keys), w.R.shape[-1])
        return Scores(R=narrow(narrow(w.R, q.shape[-2], axis=-2, start=first), keys, axis=-1))


@dataclass(frozen=True, repr=False)
class FactorizedRandomSynthesizer(_Synthesizer):
    """The random Synthesizer with a table of low rank.

    Args:
        rank: Columns of the two thin tables; 8 in the paper.
    """

    rank: int = 8

    traits = replace(_TABLE, formula="softmax(R1 R2^T) v")

    def __post_init__(self) -> None:
        at_least(self, "rank", self.rank, 1)

    def weights(self, shape: Shape) -> synthesis.Factors:
        """Thin tables whose product has variance one."""
        size = (shape.heads, shape.max_len, self.rank)
        return synthesis.Factors(*(synthesis.normal(*size, std=self.rank**-0.25) for _ in range(2)))

    def scores(self, q: Tensor, k: Tensor, w: synthesis.Factors, *, first: int, keys: int) -> Scores:
        """Rows of the first table for these queries, of the second for these keys."""
        self.within(max(first + q.shape[-2], keys), w.R1.shape[-2])
        return Scores(Q=narrow(w.R1, q.shape[-2], axis=-2, start=first), K=narrow(w.R2, keys, axis=-2))


@dataclass(frozen=True, repr=False)
class DotProduct(Value):
    """Ordinary attention scores ``q . k / sqrt(width)`` as a part of a ``MixtureSynthesizer``."""

    traits = replace(_TABLE, formula="q k^T / sqrt(d)", reads="qkv", bounded=False, learned=False)

    def weights(self, shape: Shape) -> tuple[()]:
        """None."""
        return ()

    def scores(self, q: Tensor, k: Tensor, w: tuple[()], *, first: int, keys: int) -> Scores:
        """Every query against every key."""
        return Scores(Q=q * q.shape[-1] ** -0.5, K=k)


@dataclass(frozen=True, repr=False)
class MixtureSynthesizer(_Synthesizer):
    """Scores mixed from several sources, in fractions that each head learns.

    Args:
        components: Any Synthesizers and ``DotProduct()``.
    """

    components: tuple[_Synthesizer | DotProduct, ...] = (RandomSynthesizer(), DotProduct())

    def __post_init__(self) -> None:
        if not self.components or not all(isinstance(part, _Synthesizer | DotProduct) for part in self.components):
            raise ValueError(f"{self!r}: components must be one or more Synthesizers and DotProduct()")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Bounded, random and able to cross as its components are."""
        parts, reads = zip(*((part.traits, part.traits.reads) for part in self.components), strict=True)
        return replace(
            _TABLE, formula="softmax(sum_m softmax(alpha)_m scores_m) v",
            reads="qkv" if "qkv" in reads else "qv" if "qv" in reads else "v", cross=all(part.cross for part in parts),
            bounded=any(part.bounded for part in parts), random=any(part.random for part in parts),
        )  # fmt: skip

    def weights(self, shape: Shape) -> synthesis.Mixed:
        """Equal fractions, and what the components need."""
        parts = tuple(part.weights(shape) for part in self.components)
        return synthesis.Mixed(synthesis.zeros(shape.heads, len(parts)), parts)

    def scores(self, q: Tensor, k: Tensor, w: synthesis.Mixed, *, first: int, keys: int) -> Scores:
        """The weighted sum of all scores."""
        pairs = zip(self.components, w.parts, strict=True)
        scores = [part.scores(q, k, weights, first=first, keys=keys) for part, weights in pairs]
        return mixed(scores, w.alpha.softmax(-1), keys)
