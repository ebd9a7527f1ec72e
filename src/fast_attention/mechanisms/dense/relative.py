"""Exact attention with scores that depend on positions, too: some queries against all keys, in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch, masks, offsets, tiled
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.fused import biased_attention
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.relative import Grouped
from fast_attention.engine.tiling import Span, Tile, Tiling

ROWS = 64  # queries of a tile


def relative_attention(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads keys width"],
    v: Float[Tensor, "*batch heads keys values"],
    positions: Positions,
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """``softmax(scale Q K^T + bias + mask) V`` with the bias of every offset; a query that sees nothing gets zeros.

    A tile of scores is held at a time; all of them under an ``attn_mask``, with dropout, or where code is traced.
    """
    length, keys = q.shape[-2], k.shape[-2]
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    terms = positions(torch.arange(1 - keys, length, device=q.device))
    if attn_mask is None and dropout == 0.0:
        return _relative(q, k, v, key_mask, *terms, is_causal=is_causal, scale=factor)
    dispatch.record("all scores at once", "positions add to them, under an attn_mask or with dropout")
    masked = {"attn_mask": attn_mask, "dropout": dropout}
    return _plain(q, k, v, key_mask, *terms, is_causal=is_causal, scale=factor, **masked)


@opaque(like_queries)
def _relative(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor, vectors: Tensor | None,
    *, is_causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    if why := dispatch.obstacle(q, k):
        dispatch.record("all scores at once", why)
        return _plain(q, k, v, key_mask, numbers, vectors, is_causal=is_causal, scale=scale)
    dispatch.record("softmax in tiles", "positions add to the scores", rows=min(ROWS, q.shape[-2]), keys=k.shape[-2])
    return _tiled(q, k, v, key_mask, numbers, vectors, is_causal=is_causal, scale=scale)


@in_float32
def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor, vectors: Tensor | None,
    *, is_causal: bool, scale: float, attn_mask: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    length, keys = q.shape[-2], k.shape[-2]
    bias = offsets.scores(q, Terms(numbers, vectors), keys, scale=scale).to(q.dtype)
    mask = masks.visible(length, keys, is_causal=is_causal, key_mask=key_mask, device=q.device)
    if attn_mask is not None:
        mask = masks.merge(attn_mask, mask, q.dtype)
    if mask is not None:
        bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
    return biased_attention(q, k, v, bias, dropout=dropout, scale=scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor, vectors: Tensor | None,
    *, keep: bool, is_causal: bool, scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    tiling = _tiling(q, k, *offsets.ready(numbers, vectors, q), is_causal)
    return tiled.attend(q, k, v, key_mask, tiling, scale=scale), ()


def _backward(
    inputs: tuple[Any, ...], outputs: Tensors, kept: Tensors, gradient: tuple[Tensor, ...],
    *, is_causal: bool, scale: float,
) -> Tensors:  # fmt: skip
    q, k, v, key_mask, numbers, vectors = inputs
    terms, into = offsets.ready(numbers, vectors, q)
    tiling = _tiling(q, k, terms, into, is_causal)
    return *tiled.gradients(q, k, v, key_mask, gradient[0], tiling, scale=scale), None, *(into or (None, None))


_tiled = in_float32(CustomGradient(_plain, _forward, _backward))


def _tiling(q: Tensor, k: Tensor, terms: Terms | None, into: Terms | None, is_causal: bool) -> Tiling:
    """Tiles of ``ROWS`` queries and the keys that they may see, which are parts of one tile of all offsets."""
    length, keys, total = q.shape[-2], k.shape[-2], q.shape[:-2].numel()
    rows, behind = min(ROWS, length), keys - length
    assert terms is not None
    every = torch.ones(rows, length + keys - rows, dtype=torch.bool)
    every = every.tril(keys - rows) if is_causal else every

    def tiles(group: slice) -> Iterator[Tile]:
        grouped = Grouped(terms, range(group.start, min(group.stop, total)), into)
        whole = grouped.tile(every, rows - 1)
        for first in range(0, length, rows):
            last = min(first + rows, length)
            size, end = last - first, min(max(last + behind, 1), keys) if is_causal else keys
            bias = whole.part(slice(rows - size, rows), slice(length - last, length - last + end))
            masked = None
            if is_causal and first + behind < 0:  # queries before the first key
                masked = ~torch.ones(size, end, dtype=torch.bool).tril(first + behind)
            yield Tile(Span(first, size), Span(0, end), bias, masked)
        grouped.collect()

    return Tiling(tiled.heads_together(rows * keys), tiles)
