"""Synthesizer (Tay et al. 2020): attention scores that no key takes part in, learned or drawn instead."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import pad

from fast_attention.engine import operation, trace
from fast_attention.engine.blocks import narrow
from fast_attention.engine.fused import flash_forward, takes_flash
from fast_attention.engine.heads import by_head
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.operation import Fast, Operation
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import MaskedAttention, Shape, Traits
from fast_attention.mechanisms.dense import rows
from fast_attention.mechanisms.dense.reference import synthesizer_attention
from fast_attention.mechanisms.dense.relative import relative_attention
from fast_attention.mechanisms.dense.scores import Scores, mixed
from fast_attention.traits import SCORES
from fast_attention.value import Value, at_least

_TABLE = Traits(
    paper="Tay et al. 2020, arXiv 2005.00743", formula="softmax(R) v", cost="n^2 d", complexity_exponent=2.0,
    gpu=SCORES, inputs="v", causal=True, padding=True, cross=True, mask=True, memory="growing", positions="absolute",
    needs_max_len=True, learned=True,
)  # fmt: skip
_DENSE = replace(_TABLE, formula="softmax(relu(q_i) W + b) v", inputs="qv", cross=False)


def attend(
    v: Float[Tensor, "*batch keys values"],
    scores: Scores,
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch length values"]:
    """``synthesizer_attention`` for scores in summands: a block of queries at a time where long, else all at once."""
    if attn_mask is None and dropout == 0.0:
        return _in_blocks(v, key_mask, *scores, is_causal=is_causal)
    keys = v.shape[-2]
    trace.record("all scores at once", "an attn_mask or dropout", keys=keys)
    return synthesizer_attention(
        v, scores.whole(keys), is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout
    )


def all_scores(v: Tensor, key_mask: Tensor | None, *parts: Tensor | None, is_causal: bool) -> Tensor:
    """``synthesizer_attention`` for scores in summands."""
    return synthesizer_attention(v, Scores(*parts).whole(v.shape[-2]), is_causal=is_causal, key_mask=key_mask)


_in_blocks = Operation(
    all_scores,
    cpu=Fast(
        lambda v, key_mask, *parts, is_causal: rows.attend(v, Scores(*parts), is_causal=is_causal, key_mask=key_mask),
        None, serves=lambda v, key_mask, *parts, **settings: rows.few(v, Scores(*parts).length()),
    ),
    empty=lambda v, key_mask, *parts, **settings: v.new_empty(*v.shape[:-2], Scores(*parts).length(), v.shape[-1]),
    path="all scores at once", sizes=lambda v, *others, **settings: {"keys": v.shape[-2]},
)  # fmt: skip


class Layer(NamedTuple):
    """A linear layer per head: W (H, E, outputs) and b (H, outputs)."""

    W: Tensor
    b: Tensor


class LayerPair(NamedTuple):
    """Two layers, of a and b outputs."""

    A: Layer
    B: Layer


class Table(NamedTuple):
    """Scores R (H, max_len, max_len) of every position for every position."""

    R: Tensor


class Factors(NamedTuple):
    """Two thin tables (H, max_len, rank), whose product are the scores."""

    R1: Tensor
    R2: Tensor


class Mixed(NamedTuple):
    """Logits (H, parts) of the mixture and the weights of its parts."""

    alpha: Tensor
    parts: tuple[Any, ...]


def normal(*size: int, std: float = 1.0) -> nn.Parameter:
    """A parameter drawn from N(0, std^2)."""
    return nn.Parameter(torch.randn(size) * std)


def zeros(*size: int) -> nn.Parameter:
    """A parameter that starts at zero."""
    return nn.Parameter(torch.zeros(size))


def layer(heads: int, width: int, outputs: int) -> Layer:
    """A layer whose outputs have variance about one half for rectified unit inputs; biases start at zero."""
    return Layer(normal(heads, width, outputs, std=width**-0.5), zeros(heads, outputs))


def dense_scores(q: Float[Tensor, "*batch length width"], w: Layer, keys: int) -> Scores:
    """``relu(q_i) W + b`` for the first keys: the dense Synthesizer's two layers, the projection to q being the first.

    As products of one more column: ``[relu(q_i), 1] . [W_j, b_j]``, with keys that all sequences share.
    """
    table = torch.cat([narrow(w.W, keys, axis=-1), narrow(w.b, keys, axis=-1)[:, None]], 1)
    return Scores(Q=F.pad(q.relu(), (0, 1), value=1.0), K=table.mT)


def dense_attention(
    q: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch keys values"],
    w: Layer,
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(relu(q_i) W + b) v``; long, by exact attention: columns of W are keys, b is a channel more of them."""
    keys, few = v.shape[-2], operation.unsupported_reason(v) or rows.few(v, q.shape[-2])
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, v, *w))
    if not few and key_mask is None and not is_causal and not trained:
        k, b = narrow(w.W, keys, axis=-1).mT.contiguous(), narrow(w.b, keys, axis=-1)[:, None]
        k = k.expand(*v.shape[:-2], *k.shape[-2:])
        if takes_flash(q, k, v):
            trace.record("torch's fused kernel", "the bias of a key is a mask of one row")
            b = b.expand(len(v), -1, -1, -1)
            return flash_forward(q.relu(), k, v, b, keep=False, is_causal=False, scale=1.0)[0]
    scores = dense_scores(q, w, keys)
    if few or scores.Q is None or scores.K is None:
        return attend(v, scores, is_causal=is_causal, key_mask=key_mask)
    k = scores.K.contiguous().expand(*v.shape[:-2], -1, -1)
    return relative_attention(scores.Q, k, v, None, is_causal=is_causal, key_mask=key_mask, scale=1.0)


def outer_scores(q: Float[Tensor, "*batch length width"], w: LayerPair) -> Scores:
    """``A_i,(j // b) B_i,(j mod b)`` for key j: a row of a b scores out of a + b numbers, from two dense layers."""
    A, B = (by_head(q.relu(), each.W) + each.b[..., None, :] for each in w)
    return Scores(X=A, Y=B)


class _Synthesizer(MaskedAttention[Any, KVCache]):
    @abstractmethod
    def scores(self, q: Tensor, k: Tensor, w: Any, *, first: int, keys: int) -> Scores:
        """Scores of the queries at positions ``first`` and on, one set for all sequences where q takes no part."""

    @in_float32
    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, *,
        is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Softmax of the scores under any mask, times the values. Causal queries are the last of as many as keys."""
        first = v.shape[-2] - q.shape[-2] if is_causal else 0
        if not symbolic() and first < 0:  # more queries than keys, the first of which see nothing
            if attn_mask is not None:
                attn_mask = attn_mask.expand(*attn_mask.shape[:-2], q.shape[-2], v.shape[-2])[..., -first:, :]
            options: Any = {"is_causal": True, "key_mask": key_mask, "attn_mask": attn_mask, "dropout": dropout}
            return pad(self.attend_masked(q[..., -first:, :], k, v, w, **options), (0, 0, -first, 0))
        scores = self.scores(q, k, w, first=first, keys=v.shape[-2])
        return attend(v, scores, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: KVCache | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Append the new tokens to the cached values (and keys, where they are read) and weigh all of them."""
        state = append(state, k if self.traits.inputs == "qkv" else k[..., :0], v, key_mask)
        keys = state.v.shape[-2]
        scores = self.scores(q, state.k, w, first=keys - q.shape[-2], keys=keys)
        return attend(state.v, scores, is_causal=True, key_mask=state.visible), state


@dataclass(frozen=True, repr=False)
class DenseSynthesizer(_Synthesizer):
    """A small network tells from each query alone which positions it attends to."""

    traits = _DENSE

    def weights(self, shape: Shape) -> Layer:
        """The layer after the projection to q, one output per position."""
        return layer(shape.heads, shape.head_dim, shape.max_len)

    @in_float32
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Attend to the columns of the layer as keys, where torch's kernel takes that; else a block at a time."""
        self.within(v.shape[-2], w.b.shape[-1])
        return dense_attention(q, v, w, is_causal=is_causal, key_mask=key_mask)

    def scores(self, q: Tensor, k: Tensor, w: Layer, *, first: int, keys: int) -> Scores:
        """One row per token."""
        self.within(keys, w.b.shape[-1])
        return dense_scores(q, w, keys)


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

    def weights(self, shape: Shape) -> LayerPair:
        """The two layers after the projection to q."""
        a = self.factor or max(round(shape.max_len**0.5), 1)
        sizes = (a, -(-shape.max_len // a))
        return LayerPair(*(layer(shape.heads, shape.head_dim, size) for size in sizes))

    def scores(self, q: Tensor, k: Tensor, w: LayerPair, *, first: int, keys: int) -> Scores:
        """One row per token, out of two."""
        self.within(keys, w.A.b.shape[-1] * w.B.b.shape[-1])
        return outer_scores(q, w)


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

    def weights(self, shape: Shape) -> Table:
        """The table, per head."""
        R = normal(shape.heads, shape.max_len, shape.max_len)
        return Table(R if self.trainable else R.detach())

    def scores(self, q: Tensor, k: Tensor, w: Table, *, first: int, keys: int) -> Scores:
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

    def weights(self, shape: Shape) -> Factors:
        """Thin tables whose product has variance one."""
        size = (shape.heads, shape.max_len, self.rank)
        return Factors(*(normal(*size, std=self.rank**-0.25) for _ in range(2)))

    def scores(self, q: Tensor, k: Tensor, w: Factors, *, first: int, keys: int) -> Scores:
        """Rows of the first table for these queries, of the second for these keys."""
        self.within(max(first + q.shape[-2], keys), w.R1.shape[-2])
        return Scores(Q=narrow(w.R1, q.shape[-2], axis=-2, start=first), K=narrow(w.R2, keys, axis=-2))


@dataclass(frozen=True, repr=False)
class DotProduct(Value):
    """Ordinary attention scores ``q . k / sqrt(width)`` as a part of a ``MixtureSynthesizer``."""

    traits = replace(_TABLE, formula="q k^T / sqrt(d)", inputs="qkv", needs_max_len=False, learned=False)

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
        parts, inputs = zip(*((part.traits, part.traits.inputs) for part in self.components), strict=True)
        return replace(
            _TABLE, formula="softmax(sum_m softmax(alpha)_m scores_m) v",
            inputs="qkv" if "qkv" in inputs else "qv" if "qv" in inputs else "v",
            cross=all(part.cross for part in parts),
            needs_max_len=any(part.needs_max_len for part in parts), random=any(part.random for part in parts),
        )  # fmt: skip

    def weights(self, shape: Shape) -> Mixed:
        """Equal fractions, and what the components need."""
        parts = tuple(part.weights(shape) for part in self.components)
        return Mixed(zeros(shape.heads, len(parts)), parts)

    def scores(self, q: Tensor, k: Tensor, w: Mixed, *, first: int, keys: int) -> Scores:
        """The weighted sum of all scores."""
        pairs = zip(self.components, w.parts, strict=True)
        scores = [part.scores(q, k, weights, first=first, keys=keys) for part, weights in pairs]
        return mixed(scores, w.alpha.softmax(-1), keys)
