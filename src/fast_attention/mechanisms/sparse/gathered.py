"""Softmax of blocks of queries over gathered blocks of keys, in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import dispatch, offsets, tiled
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.fused import flash_backward, flash_forward, takes_flash
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.relative import Grouped
from fast_attention.engine.tiling import Sinks, Tile, Tiling
from fast_attention.gpu import flex, patterns
from fast_attention.mechanisms.sparse import reference
from fast_attention.mechanisms.sparse.gathered_tiles import Pattern
from fast_attention.mechanisms.sparse.reference import ends, with_ends


def gathered_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    table: Int[Tensor, "*batch blocks choices"],
    key_mask: Bool[Tensor, "*#batch2 length"],
    *,
    size: int,
    is_causal: bool = False,
    scale: float | None = None,
    start: int = 0,
    stop: int | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of every block of ``size`` queries over the blocks of keys that ``table`` names.

    A block named twice counts once, -1 names none, and a query that sees nothing gets zeros. The blocks of queries
    before ``start`` and from ``stop`` on see all keys, whatever the table and ``key_mask`` say. ``bias`` gives what
    scores gain by offsets, and ``sinks`` make normalisers larger by ``e^sink``: both for blocks in the table only.
    """
    factor, stop = float(q.shape[-1] ** -0.5 if scale is None else scale), table.shape[-2] if stop is None else stop
    if bias is None and sinks is None and flex.SIZE % size == 0 and not patterns.obstacle(q, k, v, key_mask):
        visible = patterns.chosen(q, table, size=size, is_causal=is_causal, start=start, stop=stop)
        return flex.attend(q, k, v, visible, key_mask, scale=factor)
    terms, length = (None, None), q.shape[-2]
    if bias is not None:
        terms = bias(torch.arange(1 - length, length, device=q.device))
    settings: Any = {"size": size, "is_causal": is_causal, "start": start, "stop": stop, "scale": factor}
    return _gathered(q, k, v, table, key_mask, *terms, sinks, **settings)


@opaque(like_queries)
def _gathered(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, *, size: int, is_causal: bool, start: int, stop: int, scale: float,
) -> Tensor:  # fmt: skip
    sizes, number = {"rows": size, "choices": table.shape[-1]}, table.shape[-2]
    tensors: Any = (q, k, v, table, key_mask, numbers, vectors, sinks)
    settings: Any = {"size": size, "is_causal": is_causal, "scale": scale}
    if why := dispatch.obstacle(q, k):
        dispatch.record("softmax in blocks", why, **sizes)
        plain = reference.gathered_softmax if numbers is None else in_float32(reference.gathered_softmax)
        return plain(*tensors, **settings, start=start, stop=stop)
    dispatch.record("softmax in tiles", "every block of queries reads a few blocks of keys", **sizes)
    if (start == 0 and stop == number) or takes_flash(q, k, v, scale=scale):
        return _tiled(*tensors, **settings, start=start, stop=stop)
    out = _tiled(*tensors, **settings, start=0, stop=number)
    return with_ends(out, q, k, v, start * size, stop * size, scale=scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, *, keep: bool, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Kept are the ends' normalisers, and the ends' outputs as the kernel laid them out."""
    terms = offsets.ready(numbers, vectors, q)
    tiling = _tiling(k, table, start, stop, *terms, Sinks.ready(sinks, q), size=size, is_causal=is_causal)
    out, first, last = tiled.attend(q, k, v, key_mask, tiling, scale=scale), start * size, stop * size
    if first == 0 and last >= q.shape[-2]:
        return out, ()
    rows, kept = flash_forward(ends(q, first, last), k, v, None, keep=keep, is_causal=False, scale=scale)
    out[..., :first, :], out[..., last:, :] = rows[..., :first, :], rows[..., first:, :]
    return out, (rows, *kept)


def tile_gradients(
    inputs: tuple[Any, ...], outputs: Tensors, kept: tuple[Tensor, ...], gradient: tuple[Tensor, ...],
    *, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> Tensors:  # fmt: skip
    """The gradients of queries, keys, values, of what positions add and of sinks, tile by tile."""
    q, k, v, table, key_mask, numbers, vectors, sinks = inputs
    (terms, into), every = offsets.ready(numbers, vectors, q), Sinks.ready(sinks, q)
    tiling = _tiling(k, table, start, stop, terms, into, every, size=size, is_causal=is_causal)
    if not kept:
        grads = tiled.gradients(q, k, v, key_mask, gradient[0], tiling, scale=scale)
        return *grads, None, None, *(into or (None, None)), None if every is None else every.total(sinks)
    first, last = start * size, stop * size
    rows, grad = (ends(q, first, last), k, v, None), ends(gradient[0], first, last)
    d_rows, dk, dv, _ = flash_backward(rows, kept[:1], kept[1:], (grad,), is_causal=False, scale=scale)
    assert d_rows is not None
    assert dk is not None
    assert dv is not None
    dq, dk, dv = tiled.gradients(q, k, v, key_mask, gradient[0], tiling, scale=scale, start=(dk, dv))
    dq[..., :first, :], dq[..., last:, :] = d_rows[..., :first, :], d_rows[..., first:, :]
    return dq, dk, dv, None, None, None, None, None


_tiled = in_float32(CustomGradient(reference.gathered_softmax, _forward, tile_gradients))


def _tiling(
    k: Tensor, table: Tensor, start: int, stop: int, terms: Terms | None, into: Terms | None, sinks: Sinks | None,
    *, size: int, is_causal: bool,
) -> Tiling:  # fmt: skip
    """One tile for each block of queries from ``start`` to ``stop`` and each group of heads."""
    table = table.expand(*k.shape[:-2], *table.shape[-2:]).reshape(-1, *table.shape[-2:])
    heads = tiled.heads_together(size * size * table.shape[-1])
    pattern = Pattern(table, k, heads, size=size, is_causal=is_causal)
    if terms is None:
        return Tiling(heads, lambda group: (pattern.tile(i, group) for i in range(start, stop)), size, sinks)

    def biased(group: slice) -> Iterator[Tile]:
        grouped = Grouped(terms, range(group.start, min(group.stop, len(table))), into)
        yield from (pattern.biased(i, group, grouped) for i in range(start, stop))
        grouped.collect()

    return Tiling(heads, biased, size, sinks)
