"""Softmax inside a band: blocks of queries over the slice of keys around each, in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch, offsets, tiled
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.relative import Grouped, Relative
from fast_attention.engine.tiled import Bias, Sinks, Span, Tile, Tiling, bias_of
from fast_attention.mechanisms.sparse import reference

ROWS = 64  # queries of a tile
FEW = 4  # heads, below which a tile holds chunks of one sequence instead of heads


def covers_most(q: Tensor, keys: int, window: int) -> bool:
    """Whether the fused kernel over all keys, masked, beats tiles that read ``window`` keys around every query.

    A tile reads ``window + ROWS`` keys. On two threads a masked score costs the fused kernel about three quarters of
    what it costs a tile (8 heads of width 64, 192 to 640 keys); one tile alone, or low precision, stays with tiles.
    """
    if dispatch.obstacle(q) or q.dtype.itemsize < 4:
        return False
    return q.shape[-2] > ROWS and 3 * keys <= 4 * (window + ROWS)


def banded_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    band: Bool[Tensor, "block span"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    *,
    behind: int,
    front: int = 0,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of query blocks over the keys from ``behind`` positions before each block on, through ``band``.

    Query i stands at position i + keys - length. The first block begins ``front`` positions before the first query.
    Every query must see some position through ``band``, inside the sequence or not. Without ``attn_mask`` and dropout
    one tile of scores is held at a time, else length * span of them, never length * keys. ``bias`` gives what scores
    gain by offsets, of which a block and its slice have ``block + span - 1``. ``sinks`` make normalisers larger by
    ``e^sink``.
    """
    factor, (rows, span) = float(q.shape[-1] ** -0.5 if scale is None else scale), band.shape
    terms = offsets.between(bias, 1 - behind - rows, rows + span - 1, q)
    if attn_mask is None and dropout == 0.0:
        return _banded(q, k, v, band, key_mask, *terms, sinks, behind=behind, front=front, scale=factor)
    why = "dropout" if attn_mask is None else "a mask of the caller's"
    dispatch.record("softmax in blocks", why, rows=rows, keys=span)
    plain = reference.banded_softmax if bias is None else reference.biased_softmax
    masked: Any = {"attn_mask": attn_mask, "dropout": dropout}
    return plain(q, k, v, band, key_mask, *terms, sinks, behind=behind, front=front, scale=factor, **masked)


@opaque(like_queries)
def _banded(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, key_mask: Tensor | None, numbers: Tensor | None,
    vectors: Tensor | None, sinks: Tensor | None, *, behind: int, front: int, scale: float,
) -> Tensor:  # fmt: skip
    where: Any = {"behind": behind, "front": front, "scale": scale}
    why = dispatch.obstacle(q, k)
    if why:
        dispatch.record("softmax in blocks", why, rows=len(band), keys=band.shape[1])
        plain = reference.banded_softmax if numbers is None else reference.biased_softmax
        return plain(q, k, v, band, key_mask, numbers, vectors, sinks, **where)
    rows, why = min(len(band), ROWS), "only keys near a block of queries are seen"
    dispatch.record("softmax in tiles", why, rows=rows, keys=band.shape[1])
    return _tiled(q, k, v, band, key_mask, numbers, vectors, sinks, **where)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, key_mask: Tensor | None, numbers: Tensor | None,
    vectors: Tensor | None, sinks: Tensor | None, *, keep: bool, behind: int, front: int, scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    tiling = _tiling(q, k, band, behind, front, *offsets.ready(numbers, vectors, q))._replace(
        sinks=Sinks.ready(sinks, q)
    )
    return tiled.attend(q, k, v, key_mask, tiling, scale=scale), ()


def _backward(
    inputs: tuple[Any, ...], outputs: Tensors, kept: Tensors, gradient: tuple[Tensor, ...],
    *, behind: int, front: int, scale: float,
) -> Tensors:  # fmt: skip
    q, k, v, band, key_mask, numbers, vectors, sinks = inputs
    terms, into = offsets.ready(numbers, vectors, q)
    every = Sinks.ready(sinks, q)
    tiling = _tiling(q, k, band, behind, front, terms, into)._replace(sinks=every)
    gradients = tiled.gradients(q, k, v, key_mask, gradient[0], tiling, scale=scale)
    return *gradients, None, None, *(into or (None, None)), None if every is None else every.total(sinks)


_tiled = in_float32(CustomGradient(reference.banded_softmax, _forward, _backward))


def _tiling(
    q: Tensor, k: Tensor, band: Tensor, behind: int, front: int, terms: Terms | None, into: Terms | None
) -> Tiling:
    """The tiles of a band; few heads get many chunks of one sequence side by side instead."""
    total, length, keys = q.shape[:-2].numel(), q.shape[-2], k.shape[-2]
    heads = tiled.heads_together(min(band.shape[0], ROWS) * band.shape[1]) if total >= FEW else 1
    sizes = length, keys, keys - length - front - behind, front, heads, q.dtype
    if terms is None:
        tiles = list(_tiles(band, *sizes))
        return Tiling(heads, lambda group: tiles)

    def of_heads(group: slice) -> Iterator[Tile]:
        grouped = Grouped(terms, range(group.start, min(group.stop, total)), into)
        yield from _tiles(band, *sizes, grouped)
        grouped.collect()

    return Tiling(heads, of_heads)


def _tiles(
    band: Tensor, length: int, keys: int, start: int, front: int, heads: int, dtype: torch.dtype,
    terms: Grouped | None = None,
) -> Iterator[Tile]:  # fmt: skip
    """Tiles of ``ROWS`` queries; the first slice of keys begins at ``start``."""
    block = band.shape[0]
    count = (length + front + block - 1) // block
    for r in range(0, block, ROWS):
        visible = band[r : r + ROWS]
        columns = visible.any(0).nonzero()
        low, high = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 1)
        visible, rows, span = visible[:, low:high], len(visible), high - low
        q0, k0 = r - front, start + low
        bias = bias_of(visible, dtype) if terms is None else terms.tile(visible, block - 1 + low - r)
        inner = max(-(min(q0, k0) // block), 0)  # blocks from here to ``end`` lie inside the sequence
        end = max(min((length - rows - q0) // block, (keys - span - k0) // block) + 1, inner)
        number = 1 if heads > 1 else max(min(tiled.SCORES // (rows * span), (end - inner) // -(-span // block)), 1)
        each = (end - inner) // number
        for n in range(inner, inner + each):
            queries = Span(q0 + n * block, rows, number, each * block)
            yield Tile(queries, Span(k0 + n * block, span, number, each * block), bias)
        for n in (*range(min(inner, count)), *range(inner + each * number, count)):
            tile = _clipped(q0 + n * block, k0 + n * block, visible, length, keys, dtype, bias)
            if tile.queries.size > 0:
                yield tile


def _clipped(
    first: int, low: int, visible: Tensor, length: int, keys: int, dtype: torch.dtype, bias: Tensor | Bias | None
) -> Tile:  # fmt: skip
    """What of a tile lies inside the sequence."""
    above, left = max(-first, 0), max(-low, 0)
    rows, columns = slice(above, max(length - first, 0)), slice(left, max(keys - low, 0))
    visible = visible[rows, columns]
    queries, span = Span(first + above, visible.shape[0]), Span(low + left, visible.shape[1])
    tile = Tile.of(queries, span, visible, dtype)
    return tile._replace(bias=bias.part(rows, columns)) if isinstance(bias, Relative) else tile
