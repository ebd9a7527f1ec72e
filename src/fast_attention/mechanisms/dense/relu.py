"""ReLU attention (Wortsman et al. 2023, and others): scores below zero get no weight at all.

Tiles of queries meet tiles of keys, and no table of all scores is made: no maximum is needed, so that tiles of keys
simply add up. The backward pass forms every tile's scores again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks, numerics, trace
from fast_attention.engine.heads import short
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import traced
from fast_attention.mechanism import MaskedAttention, Traits
from fast_attention.traits import SCORES
from fast_attention.value import at_least, one_of

Power = Literal[1, 2]
Norm = Literal["sum", "length", "none"]
NORMS: tuple[Norm, ...] = get_args(Norm)
HEADS, QUERIES, KEYS = 2, 256, 512  # of a tile: a megabyte in float32


class How(NamedTuple):
    """The settings: n_i is the ``norm``, ``eps`` added to a sum."""

    is_causal: bool
    norm: Norm
    power: Power
    scale: float
    eps: float | Tensor


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
    out = _tiled(q, k, v, key_mask, how=how)
    if how.norm != "sum" or numerics.finite(out):
        return out
    q, k, v, how, smaller, _ = _within_range(q, k, v, how)
    return _tiled(q, k, v, key_mask, how=how._replace(eps=float(how.eps))) / smaller


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
    scores = q @ k.mT * how.scale
    mask = masks.visible(q.shape[-2], k.shape[-2], is_causal=how.is_causal, key_mask=key_mask, device=q.device)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(scores.dtype)
            scores, attn_mask = scores + attn_mask, attn_mask > float("-inf")
        mask = attn_mask if mask is None else attn_mask & mask
    weights = scores.relu().square() if how.power == 2 else scores.relu()
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    if how.norm == "sum":
        total = numerics.nan_if_infinite(weights.sum(-1, keepdim=True) + how.eps)
        weights = weights / total.masked_fill(total == 0.0, 1.0)
    elif how.norm == "length":
        visible = k.shape[-2] if mask is None else mask.expand(scores.shape).sum(-1, keepdim=True).clamp_min(1)
        weights = weights / visible
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    return weights @ v


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool, how: How
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, and the n_i to be saved."""
    out = v.new_zeros((*q.shape[:-1], v.shape[-1]))
    n = _lengths(q, k, key_mask, how) if how.norm == "length" else q.new_full((*q.shape[:-1], 1), how.norm == "none")
    (qs, ks, vs), outs, ns = _heads(q, masks.drop(k, key_mask), v), out.flatten(0, -3), n.flatten(0, -3)
    keys_before = _keys_before(q, k, how)
    for heads, rows in _rows(qs):
        queries, o, total = qs[heads, rows] * how.scale, outs[heads, rows], ns[heads, rows]
        for keys, weights in _tiles(queries, ks[heads], rows, keys_before):
            if how.power == 2:
                weights.square_()
            if how.norm == "sum":
                total += weights.sum(-1, keepdim=True)
            o.baddbmm_(weights, vs[heads, keys])
        if how.norm == "sum":
            total.copy_(numerics.nan_if_infinite(total + how.eps)).masked_fill_(total == 0.0, 1.0)
        o.div_(total)
    return out, (n,)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, how: How,
) -> tuple[Any, ...]:  # fmt: skip
    q, k, v, key_mask = inputs
    d_inputs = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dqs, dks, dvs = (x.flatten(0, -3) for x in d_inputs)
    (qs, ks, vs), (os, gs, ns) = _heads(q, masks.drop(k, key_mask), v), _heads(outputs[0], gradients[0], saved[0])
    keys_before = _keys_before(q, k, how)
    for heads, rows in _rows(qs):
        queries, g = qs[heads, rows] * how.scale, gs[heads, rows] / ns[heads, rows]
        shift = (g * os[heads, rows]).sum(-1, keepdim=True) if how.norm == "sum" else None
        for keys, scores in _tiles(queries, ks[heads], rows, keys_before):
            slopes = g @ vs[heads, keys].mT
            if shift is not None:
                slopes.sub_(shift)
            if how.power == 2:
                slopes.mul_(scores).mul_(2.0)
                scores.square_()
            else:
                torch.ops.aten.threshold_backward.grad_input(slopes, scores, 0.0, grad_input=slopes)
            dvs[heads, keys].baddbmm_(scores.mT, g)
            dks[heads, keys].baddbmm_(slopes.mT, queries)
            dqs[heads, rows].baddbmm_(slopes, ks[heads, keys], alpha=how.scale)
    return *d_inputs, None


def _few(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, how: How) -> str:
    if q.shape[-2] == 1:
        return "one query"
    return "many short sequences" if short(q, k) else ""


_FAST = Fast(
    _forward, _backward, serves=_few, even=3, path="tiles of scores, added up",
    why="relu needs no maximum over the row", sizes=lambda *tensors, **settings: {"queries": QUERIES, "keys": KEYS},
)  # fmt: skip
_tiled = Operation(whole, cpu=_FAST, cuda=_FAST, path="all scores at once")


def _heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.reshape(-1, *x.shape[-2:]) for x in tensors)


def _rows(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads and queries of a tile: fewer heads, more queries."""
    few = min(HEADS, q.shape[0])
    some = QUERIES * HEADS // few
    for first in range(0, q.shape[0], few):
        for start in range(0, q.shape[1], some):
            yield slice(first, first + few), slice(start, min(start + some, q.shape[1]))


def _tiles(q: Tensor, k: Tensor, rows: slice, keys_before: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Tiles of keys that some of the queries see, and their rectified scores, zero where a key is not seen yet.

    Causal with ``keys_before`` keys before the first query; None: not causal.
    """
    end = k.shape[1] if keys_before is None else max(rows.stop + keys_before, 0)
    workspace = q.new_empty(q.shape[0] * q.shape[1] * KEYS)
    for start in range(0, end, KEYS):
        stop = min(start + KEYS, end)
        scores = workspace[: q.shape[0] * q.shape[1] * (stop - start)].view(*q.shape[:2], stop - start)
        torch.bmm(q, k[:, start:stop].mT, out=scores).relu_()
        if keys_before is not None and stop > rows.start + keys_before:
            scores.tril_(rows.start + keys_before - start)
        yield slice(start, stop), scores


def _keys_before(q: Tensor, k: Tensor, how: How) -> int | None:
    return k.shape[-2] - q.shape[-2] if how.is_causal else None


def _lengths(q: Tensor, k: Tensor, key_mask: Tensor | None, how: How) -> Tensor:
    """Keys that every query sees, at least 1."""
    counts = k.new_ones((*q.shape[:-2], k.shape[-2]))
    counts = counts if key_mask is None else counts * key_mask
    if not how.is_causal:
        counts = counts.sum(-1, keepdim=True).expand(*counts.shape[:-1], q.shape[-2])
    else:
        keys_before = k.shape[-2] - q.shape[-2]
        counts = F.pad(counts.cumsum(-1), (max(-keys_before, 0), 0))[..., max(keys_before, 0) :]
    return counts.clamp(min=1.0)[..., None].contiguous()


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
        one_of(self, "norm", self.norm, Norm)
        one_of(self, "power", self.power, Power)
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
