"""Exact attention whose scores gain numbers by position, or whose keys are masked: by tiles in the compiled core.

Where the core does not serve, the scores of some queries are made at a time, and made again for the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fast_attention.engine import masks, offsets, operation, tiles, trace
from fast_attention.engine.fused import biased_attention
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.operation import like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import traced

SCORES, ROWS = 1 << 19, 64  # of a block of queries in the reference: scores at most, unless the queries are fewer


def relative_attention(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads keys width"],
    v: Float[Tensor, "*batch heads keys values"],
    positions: Positions | None,
    sinks: Float[Tensor, "heads"] | None = None,
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """``softmax(scale Q K^T + bias + mask) V`` with the bias of every offset; a query that sees nothing gets zeros.

    With ``sinks`` every normaliser is larger by ``e^sink``. All scores are held at once under an ``attn_mask``, with
    dropout, or where code is traced; else those of a tile in the core, or of a block of queries.
    """
    length, keys = q.shape[-2], k.shape[-2]
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    terms = offsets.between(positions, 1 - keys, length + keys - 1, q)
    if attn_mask is None and dropout == 0.0:
        spans = () if key_mask is None or traced() else (tiles.spans(key_mask.expand(*q.shape[:-3], 1, keys)),)
        return _relative(q, k, v, key_mask, *terms, sinks, *spans, is_causal=is_causal, scale=factor, first=1 - length)
    trace.record("all scores at once", "positions or sinks add to them, under an attn_mask or with dropout")
    masked = {"attn_mask": attn_mask, "dropout": dropout}
    return _all_scores(q, k, v, key_mask, *terms, sinks, is_causal=is_causal, scale=factor, **masked)


@in_float32
def _all_scores(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, *, is_causal: bool, scale: float, first: int = 0, attn_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Relative attention by all scores at once; ``first`` belongs to the terms, which are those of all offsets."""
    length, keys = q.shape[-2], k.shape[-2]
    bias = None if numbers is None else offsets.scores(q, Terms(numbers, vectors), keys, scale=scale).to(q.dtype)
    mask = masks.visible(length, keys, is_causal=is_causal, key_mask=key_mask, device=q.device)
    if attn_mask is not None:
        mask = masks.merge(attn_mask, mask, q.dtype)
    if mask is not None and bias is not None:
        mask = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
    return biased_attention(q, k, v, bias if mask is None else mask, dropout=dropout, scale=scale, sinks=sinks)


def _rows(q: Tensor, k: Tensor) -> int:
    """Queries whose scores are made at one time."""
    length = q.shape[-2]
    if traced() or not operation.has_cpu_path(q):
        return length
    return min(max(SCORES // max(q.shape[:-2].numel() * k.shape[-2], 1), ROWS), length)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, spans: Tensor | None = None, *, is_causal: bool, scale: float, first: int,
) -> Tensor:  # fmt: skip
    """Relative attention by the scores of a block of queries at a time; ``spans`` serve the core."""
    length, keys, rows = q.shape[-2], k.shape[-2], _rows(q, k)
    settings: Any = {"is_causal": is_causal, "scale": scale}
    if rows == length:
        return _all_scores(q, k, v, key_mask, numbers, vectors, sinks, **settings)
    parts, start = list[Tensor](), 0
    for queries in q.split(rows, -2):
        stop = start + queries.shape[-2]
        end = max(stop + keys - length, 0) if is_causal else keys
        at = slice(length - stop, length - start + end - 1)
        own = (None if numbers is None else numbers[:, at], None if vectors is None else vectors[:, at])
        mask = None if key_mask is None else key_mask[..., :end]
        inputs = queries, k[..., :end, :], v[..., :end, :], mask, *own, sinks
        parts.append(checkpoint(_all_scores, *inputs, use_reentrant=False, preserve_rng_state=False, **settings))
        start = stop
    return torch.cat(parts, -2)


def _path(q: Tensor, k: Tensor, *others: Any, **settings: Any) -> str:
    return "all scores at once" if _rows(q, k) == q.shape[-2] else "softmax in blocks of queries"


def _why(*tensors: Tensor | None, **settings: Any) -> str:
    added = any(x is not None for x in tensors[4:7])
    return "positions or sinks add to the scores" if added else "a mask of all pairs is not made"


def _plan(q: Tensor, k: Tensor, spans: Tensor | None = None, *, is_causal: bool) -> tiles.Plan:
    length, keys = q.shape[-2], k.shape[-2]
    return tiles.every_key(length, keys, is_causal) if spans is None else tiles.within(spans, length, keys, is_causal)


_relative = tiles.operation(_in_blocks, _plan, path=_path, why=_why, empty=like_queries)
