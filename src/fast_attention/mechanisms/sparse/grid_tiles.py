"""Softmax over parts of a grid in tiles: some rows of stripes of queries over the rows of keys that these see."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import tiled
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tiling import Sinks, Span, Tile, Tiling, bias_of
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.sparse import grid_reference as reference
from fast_attention.mechanisms.sparse import grid_rows
from fast_attention.mechanisms.sparse.grid import Axis
from fast_attention.mechanisms.sparse.stripes import TOGETHER, Columns, Rows, Stripes, columns, ordered, rows


class Batch(NamedTuple):
    """Stripes that are computed together: their queries, the keys that these read, and the tiles of each."""

    queries: Stripes
    keys: Stripes
    tiling: Tiling

    def beside(self, sinks: Sinks | None) -> Tiling:
        """The tiles beside the sinks of some heads, which every stripe has."""
        if sinks is None:
            return self.tiling
        stripes = len(self.queries.columns)
        gradient = None if sinks.gradient is None else torch.zeros_like(sinks.gradient).repeat(stripes)
        return self.tiling._replace(sinks=Sinks(sinks.scores.repeat(stripes), gradient))


@lru_cache(maxsize=32)
def _batches(
    height: int, width: int, down: Axis, across: Axis, leading: int, number: int, dtype: torch.dtype
) -> list[Batch]:
    """All stripes of a grid, ``number`` at a time of those whose queries see the same of their keys."""
    moves, biases = ordered(height, down.dilation), dict[tuple[Any, ...], Tensor | None]()
    tiles, batches, same = rows(down, height, moves), list[Batch](), list[Columns]()

    def bias(part: Rows, visible: Tensor) -> Tensor | None:
        near = F.pad(part.visible[:, None, :, None] & visible[None, :, None, :], (leading, 0))
        near[..., 0, :leading] = True  # the leading tokens stand in every row, and count once
        near = near.flatten(2, 3).flatten(0, 1)
        return biases.setdefault((near.shape, *near.flatten().tolist()), bias_of(near, dtype))

    def batch() -> Batch:
        size, span = same[0].visible.shape
        span, keys = span + leading, [(a, slice(b.start + leading, b.stop + leading)) for _, (a, b), _ in same]
        all_tiles, most = list[Tile](), 0
        for part in tiles:
            high, wide = part.visible.shape
            at = Span(part.first * size, high * size), Span(part.first_key * span, wide * span)
            all_tiles.append(Tile(*at, bias(part, same[0].visible)))
            most = max(most, high * size * wide * span)
        return Batch(
            Stripes(width, size, moves, [one.queries for one in same], 0), Stripes(width, span, moves, keys, leading),
            Tiling(tiled.heads_together(most), lambda group: all_tiles),
        )  # fmt: skip

    for stripe in columns(across, width):
        if same and (len(same) == number or not torch.equal(stripe.visible, same[0].visible)):
            batches.append(batch())
            same.clear()
        same.append(stripe)
    return [*batches, batch()]


class _Inputs:
    """Queries, keys, values and the mask of keys, of which stripes are gathered in memory that is reused."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        self.work, self.leading = Workspace(q), k.shape[-2] - q.shape[-2]
        self.q, self.k, self.v = (tiled.flatten(x) for x in (q, k, v))
        self.visible = None if key_mask is None else tiled.flatten(key_mask.expand(k.shape[:-1])[..., None])

    def batches(self, width: int, down: Axis, across: Axis) -> Iterator[tuple[Batch, slice]]:
        """Stripes of some heads at a time, so that they stay in cache while their tiles are computed."""
        heads, height = len(self.q), self.q.shape[-2] // width
        number = max(TOGETHER // heads, 1)
        for batch in _batches(height, width, down, across, self.leading, number, self.q.dtype):
            for first in range(0, heads, TOGETHER):
                yield batch, slice(first, first + TOGETHER)

    def of(self, batch: Batch, group: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What some stripes hold for some heads."""
        q = batch.queries.gather(self.q[group], 0, partial(self.work, "q"))
        k = batch.keys.gather(self.k[group], self.leading, partial(self.work, "k"))
        v = batch.keys.gather(self.v[group], self.leading, partial(self.work, "v"))
        if self.visible is None:
            return q, k, v, None
        return q, k, v, batch.keys.gather(self.visible[group], self.leading, self.visible.new_empty)[..., 0]


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None,
    *, keep: bool, width: int, down: Axis, across: Axis, scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    if key_mask is None and sinks is None and q.shape[-1] == v.shape[-1] and down.slides and across.slides:
        return grid_rows.attend(q, k, v, width=width, down=down, across=across, scale=scale), ()
    inputs, out = _Inputs(q, k, v, key_mask), q.new_empty(*q.shape[:-1], v.shape[-1])
    rows, every = out.view(-1, *out.shape[-2:]), Sinks.ready(sinks, q)
    for batch, group in inputs.batches(width, down, across):
        tiling = batch.beside(None if every is None else every.of(group))
        batch.queries.scatter(tiled.attend(*inputs.of(batch, group), tiling, scale=scale), rows[group])
    return out, ()


def _backward(
    inputs: tuple[Any, ...], outputs: Tensors, kept: Tensors, gradient: tuple[Tensor, ...],
    *, width: int, down: Axis, across: Axis, scale: float,
) -> Tensors:  # fmt: skip
    q, k, v, key_mask, sinks = inputs
    striped, grad_out = _Inputs(q, k, v, key_mask), tiled.flatten(gradient[0])
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    rows, every = [x.view(-1, *x.shape[-2:]) for x in (dq, dk, dv)], Sinks.ready(sinks, q)
    for batch, group in striped.batches(width, down, across):
        grad = batch.queries.gather(grad_out[group], 0, partial(striped.work, "grad"))
        some = None if every is None else every.of(group)
        tiling = batch.beside(some)
        new = tiled.gradients(*striped.of(batch, group), grad, tiling, scale=scale)
        if some is not None and tiling.sinks is not None:
            some.collect(tiling.sinks)
        batch.queries.scatter(new[0], rows[0][group])
        for dx, part in zip(rows[1:], new[1:], strict=True):
            batch.keys.add(part, dx[group])
    return dq, dk, dv, None, None if every is None else every.total(sinks)


tiled_softmax = in_float32(CustomGradient(reference.grid_softmax, _forward, _backward))
"""Softmax attention of the queries of a grid (..., height * width, E) over keys, the leading tokens first."""
