"""ReLU attention (Wortsman et al. 2023, and others): scores below zero get no weight at all.

Long sequences go a block of queries at a time (``rows``), and no table of all scores is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import numerics, trace
from fast_attention.engine.chunks import visible_counts
from fast_attention.engine.heads import short
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import traced
from fast_attention.mechanism import MaskedAttention, Traits
from fast_attention.mechanisms.dense import rows
from fast_attention.mechanisms.dense.rows import Rectified
from fast_attention.mechanisms.dense.scores import Scores
from fast_attention.traits import SCORES
from fast_attention.value import at_least

Power = Literal[1, 2]
Norm = Literal["sum", "length", "none"]
NORMS: tuple[Norm, ...] = get_args(Norm)


class How(NamedTuple):
    """The settings: n_i is the ``norm``, ``eps`` added to a sum."""

    is_causal: bool
    norm: Norm
    power: Power
    scale: float
    eps: float | Tensor

    @property
    def rectified(self) -> Rectified:
        """How scores become weights, but for a division by numbers of keys."""
        return Rectified(self.power, self.eps if self.norm == "sum" else None)


def rectified_scores(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
    *,
    is_causal: bool,
    norm: int,
    power: Power,
    scale: float,
    eps: float,
) -> Float[Tensor, "*batch length values"]:
    """``relu_attention`` without an ``attn_mask``, with the number of its norm."""
    how = How(is_causal, NORMS[norm], power, scale, eps)
    if traced():  # nobody may look whether the outputs are finite
        trace.record("all scores at once", "traced")
        return masked(q, k, v, key_mask, how=how)
    out = _blocks(q, k, v, key_mask, how=how)
    if how.norm != "sum" or numerics.finite(out):
        return out
    q, k, v, how, smaller, _ = _within_range(q, k, v, how)
    return _blocks(q, k, v, key_mask, how=how._replace(eps=float(how.eps))) / smaller


def masked(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, how: How, attn_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """All scores at once, under any mask, with dropout, brought down to where they fit before anybody has looked."""
    if how.norm != "sum":
        return whole(q, k, v, key_mask, how=how, attn_mask=attn_mask, dropout=dropout)
    q, k, v, how, smaller, less = _within_range(q, k, v, how)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask * less
    return whole(q, k, v, key_mask, how=how, attn_mask=attn_mask, dropout=dropout) / smaller


def _within_range(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor, Tensor, How, Tensor, Tensor]:
    """Brought down to where no sum overflows, and by what v and the scores were; large queries feel no ``eps``."""
    less, rows = numerics.factor(k, 2.0 ** (28 / how.power)), numerics.factor(q, 2.0 ** (40 / how.power), rows=True)
    smaller = numerics.factor(v, 2.0**28)
    return q * rows, k * less, v * smaller, how._replace(eps=how.eps * less**how.power), smaller, rows * less


def whole(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, how: How, attn_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention over all keys at once."""
    masked: Any = {"is_causal": how.is_causal, "attn_mask": attn_mask, "dropout": dropout}
    rectified = how.rectified._replace(counted=how.norm == "length")
    return rows.whole(v, q @ k.mT * how.scale, key_mask, rectified=rectified, **masked)


def _by_rows(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, how: How) -> Tensor:
    """Attention by blocks of queries."""
    scores = Scores(Q=q * how.scale, K=k)
    out = rows.attend(v, scores, is_causal=how.is_causal, key_mask=key_mask, rectified=how.rectified)
    if how.norm != "length":
        return out
    counts = visible_counts(key_mask, k, is_causal=how.is_causal)
    counts = F.pad(counts, (0, 0, q.shape[-2] - k.shape[-2], 0)) if how.is_causal else counts
    return out / counts.clamp(min=1.0)


def _few(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, how: How) -> str:
    if q.shape[-2] == 1:
        return "one query"
    if v.ndim < 3 or (key_mask is not None and key_mask.shape[-2] != 1):
        return "no heads, or masks of their own"
    return "many short sequences" if short(q, k) else ""


_FAST = Fast(_by_rows, None, serves=_few, even=3)
_blocks = Operation(whole, cpu=_FAST, cuda=_FAST, path="all scores at once")


def relu_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    norm: Norm = "sum",
    power: Power = 1,
    scale: float | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "*batch length values"]:
    """``A V`` with ``A_ij = relu(q_i . k_j scale)^power / n_i``.

    ``norm`` chooses n_i: ``"sum"`` of the row plus ``eps`` (our reading of "ReLU can also be used" in Young and
    Shen's lecture "Attention is All You Need", 2024, which gives no formula), ``"length"`` for the number of keys
    that query i may see (arXiv 2309.08586; i + 1 when causal), ``"none"`` for 1. An additive ``attn_mask`` is added
    to the scores before the relu, a boolean one removes. A row without a positive score gives zeros. With
    ``attn_mask`` or ``dropout`` it holds the scores (..., L, S), else tiles of them.
    """
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is None and dropout == 0.0:
        number = NORMS.index(norm)
        return _attend(q, k, v, key_mask, is_causal=is_causal, norm=number, power=power, scale=factor, eps=float(eps))
    how = How(is_causal, norm, power, factor, eps)
    trace.record("all scores at once", "a mask of any form, or dropout")
    return in_float32(masked)(q, k, v, key_mask, how=how, attn_mask=attn_mask, dropout=dropout)


_attend = Operation(rectified_scores, compute=torch.float32, empty=like_queries)


@dataclass(frozen=True, repr=False)
class ReLUAttention(MaskedAttention[tuple[()], KVCache]):
    """Attention with relu in the place of softmax: sparse weights, no exponential.

    Quadratic, unlike the Performer's ReLU kernel, where relu acts on features. Its error against softmax is not
    declared: the two agree in no limit, so the number would mean nothing.

    Args:
        norm: What a row is divided by: its ``"sum"`` (the output then does not change with the length of q, up to
            ``eps``), the number of keys it sees (``"length"``) or nothing (``"none"``).
        power: 1, or 2 for squared relu (Primer, arXiv 2109.08668).
        scale: Factor on the dot products; None means 1/sqrt(width).
        eps: Added to the sum, in units of the summed scores.
    """

    norm: Norm = "sum"
    power: Power = 1
    scale: float | None = None
    eps: float = 1e-6

    unordered = True
    traits = Traits(
        paper="Wortsman et al. 2023, arXiv 2309.08586",
        formula="relu(q k^T / sqrt(d)) v / sum",
        cost="n^2 d",
        complexity_exponent=2.0,
        gpu=SCORES,
        causal=True,
        padding=True,
        cross=True,
        mask=True,
        rotary=True,
        memory="growing",
    )

    def __post_init__(self) -> None:
        at_least(self, "eps", self.eps, 0.0)

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *,
        is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Weigh every key for every query under any mask."""
        return relu_attention(
            q, k, v, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout,
            norm=self.norm, power=self.power, scale=self.scale, eps=self.eps,
        )  # fmt: skip

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: KVCache | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Append the new tokens to the cached keys and values and weigh all of them."""
        state = append(state, k, v, key_mask)
        return self.attend(q, state.k, state.v, w, is_causal=True, key_mask=state.visible), state
