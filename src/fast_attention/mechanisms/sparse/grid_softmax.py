"""Softmax over parts of a grid of tokens: an image's, or a spectrogram's, row by row.

Stripes of a grid: a few of its columns, so that the tokens of neighbouring rows lie one behind another.

A stripe of keys holds the columns that a stripe of queries reads, so neighbouring ones share some. Leading tokens stand
before the columns of every row. A dilated window's rows are ordered so that those which it sees are neighbours.

Softmax over sliding windows of a grid, row by row, by torch's fused kernel: queries are read where they stand.

A query's keys are some columns of the rows around its own. In a stripe of keys, where such rows lie one behind another,
those of neighbouring queries are overlapping views: nothing but the columns of keys is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch, tiled
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.fused import biased_attention, fused_attention, open_attention
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tiled import Memory, Sinks, Span, Tile, Tiling, bias_of
from fast_attention.engine.tracing import symbolic
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse.grid import Axis, visible
from fast_attention.mechanisms.sparse.reference import blockwise_softmax

DENSE = 3  # times the keys of a tile that exact attention with a mask reads in a tile's time


TOGETHER = 16  # stripes of single heads: what is gathered of them, some MiB, stays in cache
Move = tuple[slice, slice]  # places in the grid, and where they stand in a stripe


class Stripes(NamedTuple):
    """Where the tokens of some stripes of a grid of ``width`` columns go: ``size`` to a row, leading ones included."""

    width: int
    size: int
    rows: list[Move]
    columns: list[Move]
    leading: int

    def gather(
        self, x: Shaped[Tensor, "heads length E"], front: int, memory: Memory
    ) -> Shaped[Tensor, "stripes_and_heads tokens E"]:
        """The tokens of the stripes, from a grid that begins at token ``front``; zeros where there is none."""
        grid = x[:, front:].unflatten(1, (-1, self.width))
        out = memory(len(self.columns), grid.shape[0], grid.shape[1], self.size, grid.shape[3])
        if any(to.stop - to.start < self.size - self.leading for _, to in self.columns):
            out.zero_()
        for target, part in self._pairs(grid, out):
            part.copy_(target)
        if self.leading:
            out[..., : self.leading, :] = x[:, None, : self.leading]
        return out.flatten(2, 3).flatten(0, 1)

    def scatter(
        self, stripes: Shaped[Tensor, "stripes_and_heads tokens E"], x: Shaped[Tensor, "heads length E"]
    ) -> None:
        """Put the tokens back into ``x``, the grid."""
        for target, part in self._pairs(x.unflatten(1, (-1, self.width)), self._apart(stripes, len(x))):
            target.copy_(part)

    def add(self, stripes: Shaped[Tensor, "stripes_and_heads tokens E"], x: Shaped[Tensor, "heads length E"]) -> None:
        """Add what the stripes hold to ``x``, the leading tokens and the grid."""
        apart = self._apart(stripes, len(x))
        for target, part in self._pairs(x[:, self.leading :].unflatten(1, (-1, self.width)), apart):
            target.add_(part)
        if self.leading:
            x[:, : self.leading] += apart[..., : self.leading, :].sum((0, 2))

    def _apart(self, stripes: Tensor, heads: int) -> Shaped[Tensor, "stripes heads rows size E"]:
        return stripes.view(len(self.columns), heads, -1, self.size, stripes.shape[-1])

    def _pairs(self, grid: Tensor, stripes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for stripe, (columns, to) in zip(stripes, self.columns, strict=True):
            for rows, row in self.rows:
                yield grid[:, rows, columns], stripe[:, row, to]


class Rows(NamedTuple):
    """What a tile takes of the rows of a stripe."""

    first: int
    first_key: int
    visible: Bool[Tensor, "rows span"]


class Columns(NamedTuple):
    """What a stripe takes of the columns of a grid."""

    queries: Move
    keys: Move
    visible: Bool[Tensor, "size span"]


def ordered(length: int, apart: int) -> list[Move]:
    """Every ``apart``-th row from each of the first on: where they are, and where they stand one behind another."""
    moves, end = list[Move](), 0
    for residue in range(min(apart, length)):
        start, end = end, end + -(-(length - residue) // apart)
        moves.append((slice(residue, length, apart), slice(start, end)))
    return moves


def rows(axis: Axis, length: int, moves: list[Move]) -> list[Rows]:
    """The rows of all tiles of a stripe, without what no query sees."""
    tiles = list[Rows]()
    for queries, keys, may_see in zip(*axis.places(length, torch.device("cpu")), strict=True):
        inside = ((queries >= 0) & (queries < length)).nonzero()[:, 0]
        for some in inside.split(axis.tile) if len(inside) else ():
            read = may_see[some].any(0).nonzero()[:, 0]
            ends = (int(queries[some[0]]), int(keys[read[0]]))
            first, first_key = (moves[at % axis.dilation][1].start + at // axis.dilation for at in ends)
            tiles.append(Rows(first, first_key, may_see[some][:, read]))
    return tiles


def columns(axis: Axis, length: int) -> list[Columns]:
    """The columns of all stripes."""
    stripes = list[Columns]()
    for queries, keys, may_see in zip(*axis.places(length, torch.device("cpu")), strict=True):
        if ((queries >= 0) & (queries < length)).any():
            moves = (_move(x, length, axis.dilation) for x in (queries, keys))
            stripes.append(Columns(next(moves), next(moves), may_see))
    return stripes


def _move(places: Int[Tensor, "size"], length: int, apart: int) -> Move:
    """Those of the places that lie inside the axis."""
    inside = ((places >= 0) & (places < length)).nonzero()[:, 0]
    first, last = int(inside[0]), int(inside[-1])
    return slice(int(places[first]), int(places[last]) + 1, apart), slice(first, last + 1)


TILE = 16  # columns of queries that read the same columns of keys

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Run(NamedTuple):
    """Rows of queries and what they see: ``window`` rows of keys, from ``first`` on or, if it ``moves``, each one row
    further on than the one before.
    """

    places: slice  # in the grid
    first: int  # in a stripe
    number: int
    moves: bool

    def keys(self, x: Float[Tensor, "heads tokens E"], span: int, window: int) -> Float[Tensor, "heads rows keys E"]:
        """The keys of every row, a view of a stripe with ``span`` tokens to a row."""
        rows = self.number if self.moves else 1
        some = x[:, self.first * span : (self.first + rows - 1 + window) * span]
        return some.unfold(1, window * span, span).mT.expand(-1, self.number, -1, -1)


def runs(axis: Axis, length: int) -> Iterator[tuple[int, list[Run]]]:
    """The rows of a grid that see each other, by their window: it stands still at both ends and moves between them."""
    for places, among in ordered(length, axis.dilation):
        number = among.stop - among.start
        window = min(axis.window, number)
        before, last = window // 2, number - window
        ends = (0, 0, before, False), (before, 0, last + 1, True), (before + last + 1, last, window - before - 1, False)
        step, start = axis.dilation, places.start
        yield (
            window,
            [
                Run(slice(start + row * step, start + (row + rows) * step, step), among.start + first, rows, moves)
                for row, first, rows, moves in ends
                if rows
            ],
        )


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys width"],
    *,
    width: int,
    down: Axis,
    across: Axis,
    scale: float,
) -> Float[Tensor, "*batch length width"]:
    """Outputs of the queries of a grid over its keys, the leading tokens first."""
    out, work, leading = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        Workspace(q),
        k.shape[-2] - q.shape[-2],
    )
    queries, k, v = (tiled.flatten(x) for x in (q, k, v))
    grids = [x.view(len(queries), -1, width, x.shape[-1]) for x in (queries, out)]
    height = grids[0].shape[1]
    parts, moves = [*runs(down, height)], ordered(height, down.dilation)
    for stripe in columns(across._replace(tile=TILE), width):
        span = leading + stripe.visible.shape[-1]
        places, to = stripe.keys
        keys = Stripes(width, span, moves, [(places, slice(leading + to.start, leading + to.stop))], leading)
        biases = [_bias(stripe, window, leading, q.dtype) for window, _ in parts]
        for first in range(0, len(queries), TOGETHER):
            group = slice(first, first + TOGETHER)
            held = [keys.gather(x[group], leading, partial(work, name)) for x, name in ((k, "k"), (v, "v"))]
            q_grid, out_grid = (x[group, :, stripe.queries[0]] for x in grids)
            for bias, (window, some) in zip(biases, parts, strict=True):
                for run in some:
                    near = (run.keys(x, span, window) for x in held)
                    rows = run.places
                    out_grid[:, rows] = _kernel(q_grid[:, rows], *near, 0.0, False, attn_mask=bias, scale=scale)[0]
    return out


def _bias(stripe: Columns, window: int, leading: int, dtype: torch.dtype) -> Tensor | None:
    """What a stripe's queries do not see of their rows of keys: leading tokens stand in every row, and count once."""
    inside = stripe.queries[1]
    near = F.pad(stripe.visible[inside, None].expand(-1, window, -1), (leading, 0))
    near[:, 0, :leading] = True
    return bias_of(near.flatten(1), dtype)


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
        return attend(q, k, v, width=width, down=down, across=across, scale=scale), ()
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


def plain_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None,
    *, width: int, down: Axis, across: Axis, scale: float,
) -> Tensor:  # fmt: skip
    """Softmax attention of the tokens of a grid, every tile's keys gathered; arguments as in ``grid_softmax``."""
    length, leading, device = q.shape[-2], k.shape[-2] - q.shape[-2], q.device
    tall, wide = down.places((length + width - 1) // width, device), across.places(width, device)
    tile = torch.arange(tall.queries.shape[0] * wide.queries.shape[0], device=device)
    row, column = tile.div(wide.queries.shape[0], rounding_mode="floor"), tile % wide.queries.shape[0]
    queries, keys = (
        (rows[row][:, :, None] * width + columns[column][:, None]).flatten(1, 2)
        for rows, columns in zip(tall[:2], wide[:2], strict=True)
    )
    visible = tall.visible[row][:, :, None, :, None] & wide.visible[column][:, None, :, None]
    visible = visible.flatten(3, 4).flatten(1, 2) & (keys < length)[:, None]
    first = torch.arange(leading, device=device).expand(keys.shape[0], leading)
    keys = torch.cat((first, leading + keys.clamp(min=0).clamp(max=length - 1)), -1)
    visible = F.pad(visible, (leading, 0), value=True)
    if key_mask is not None:
        visible = visible & key_mask[..., keys][..., None, :]
    queries = queries.clamp(min=0).clamp(max=length - 1)
    attend = blockwise_softmax if sinks is None else partial(biased_attention, sinks=sinks[:, None])
    near = attend(q[..., queries, :], k[..., keys, :], v[..., keys, :], visible, scale=scale)
    at = torch.arange(length, device=device)
    (row, i), (column, j) = down.tile_of(at.div(width, rounding_mode="floor")), across.tile_of(at % width)
    return near[..., row * wide.queries.shape[0] + column, i * across.size + j, :]


tiled_softmax = in_float32(CustomGradient(plain_softmax, _forward, _backward))
"""Softmax attention of the queries of a grid (..., height * width, E) over keys, the leading tokens first."""


def grid_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    key_mask: Bool[Tensor, "*#batch2 length"] | None,
    sinks: Float[Tensor, "heads"] | None = None,
    *,
    width: int,
    down: Axis,
    across: Axis,
    leading: int,
    scale: float | None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the keys whose row ``down`` and whose column ``across`` let a query see.

    The first ``leading`` tokens see all and are seen by all; then come the rows of a grid, ``width`` tokens each, the
    last of which may end early. A stripe of tiles is held at a time. The exponentials of ``sinks`` (H,) add to
    normalisers.
    """
    length = q.shape[-2]
    if not symbolic():
        height = -(-(length - leading) // width)
        if height <= 0 or (down.covers(height) and across.covers(width)):
            return softmax_attention(q, k, v, key_mask=key_mask, scale=scale, sinks=sinks)
        down, across = down.within(height), across.within(width)
        few = length <= DENSE * (down.span * (across.span + leading))
        if few and sinks is None and q.dtype.itemsize >= 4 and not dispatch.obstacle(q):
            dispatch.record("exact attention with the window as mask", "tiles would leave out few of so few keys")
            window = visible(length, width, down, across, leading, q.device)
            return softmax_attention(q, k, v, key_mask=key_mask, attn_mask=window, scale=scale)
    return _in_grid(
        q, k, v, key_mask, sinks, width=width, leading=leading,
        row_window=down.window, row_dilation=down.dilation, row_shift=down.shift, row_tile=down.tile,
        column_window=across.window, column_dilation=across.dilation, column_shift=across.shift,
        column_tile=across.tile, scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
    )  # fmt: skip


@opaque(like_queries)
def _in_grid(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None,
    *, width: int, leading: int, row_window: int, row_dilation: int, row_shift: int, row_tile: int,
    column_window: int, column_dilation: int, column_shift: int, column_tile: int, scale: float,
) -> Tensor:  # fmt: skip
    down = Axis(row_window, row_dilation, row_shift, row_tile)
    across = Axis(column_window, column_dilation, column_shift, column_tile)
    settings: dict[str, Any] = {"width": width, "down": down, "across": across, "scale": scale}
    if why := dispatch.obstacle(q, k):
        dispatch.record("softmax in blocks", why, rows=down.size, columns=across.size)
        out = plain_softmax(q[..., leading:, :], k, v, key_mask, sinks, **settings)
    else:
        why = "only keys near a rectangle of queries are seen"
        dispatch.record("softmax in tiles", why, rows=down.size, columns=across.size)
        out = _padded(q[..., leading:, :], k, v, key_mask, sinks, **settings)
    if leading == 0:
        return out
    everything = None if key_mask is None else key_mask[..., None, :].expand(*q.shape[:-2], leading, k.shape[-2])
    attend = fused_attention if sinks is None else partial(open_attention, sinks=sinks)
    return torch.cat((attend(q[..., :leading, :], k, v, everything, scale=scale), out), -2)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None, *, width: int, **settings: Any
) -> Tensor:
    """``tiled_softmax`` of a grid whose last row may end early, filled up by keys that are masked."""
    length = q.shape[-2]
    if missing := -length % width:
        key_mask = torch.ones(1, k.shape[-2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
        key_mask = F.pad(key_mask, (0, missing))
    return tiled_softmax(q, k, v, key_mask, sinks, width=width, **settings)[..., :length, :]
