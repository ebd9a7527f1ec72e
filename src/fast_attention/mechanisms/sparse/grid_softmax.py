"""Softmax over parts of a grid of tokens: an image's, or a spectrogram's, row by row."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention import core
from fast_attention.engine import operation, tiles, trace
from fast_attention.engine.fused import biased_attention, fused_attention, open_attention
from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tiles import FAR, MOST_ROWS, ROWS, Plan
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse.grid import Axis, visible
from fast_attention.mechanisms.sparse.reference import blockwise_softmax

DENSE = 3  # times the keys of a tile that exact attention with a mask reads in a tile's time


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
    last of which may end early. The exponentials of ``sinks`` (H,) add to
    normalisers.
    """
    length = q.shape[-2]
    if not symbolic():
        height = -(-(length - leading) // width)
        if height <= 0 or (down.covers(height) and across.covers(width)):
            return softmax_attention(q, k, v, key_mask=key_mask, scale=scale, sinks=sinks)
        down, across = down.within(height), across.within(width)
        few = length <= DENSE * (down.span * (across.span + leading))
        plain = few and sinks is None and q.dtype.itemsize >= 4 and not operation.unsupported_reason(q)
        if plain and core.unavailable():
            trace.record("exact attention with the window as mask", "tiles would leave out few of so few keys")
            window = visible(length, width, down, across, leading, q.device)
            return softmax_attention(q, k, v, key_mask=key_mask, attn_mask=window, scale=scale)
    return _in_grid(
        q, k, v, key_mask, sinks, width=width, leading=leading,
        row_window=down.window, row_dilation=down.dilation, row_shift=down.shift, row_tile=down.tile,
        column_window=across.window, column_dilation=across.dilation, column_shift=across.shift,
        column_tile=across.tile, scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
    )  # fmt: skip


def _of_grid(
    *, width: int, leading: int, row_window: int, row_dilation: int, row_shift: int, row_tile: int, column_window: int,
    column_dilation: int, column_shift: int, column_tile: int, scale: float,
) -> dict[str, Any]:  # fmt: skip
    """The settings of ``plain_softmax``, of numbers."""
    down = Axis(row_window, row_dilation, row_shift, row_tile)
    across = Axis(column_window, column_dilation, column_shift, column_tile)
    return {"width": width, "leading": leading, "down": down, "across": across, "scale": scale}


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None, **numbers: Any
) -> Tensor:
    return plain_softmax(q, k, v, key_mask, sinks, **_of_grid(**numbers))


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None, **numbers: Any) -> Tensor:
    settings = _of_grid(**numbers)
    order = _order(q.shape[-2], *(settings[name] for name in ("width", "leading", "down", "across")))
    if order is None:
        return _compiled(q, k, v, key_mask, None, None, sinks, **settings)
    if key_mask is not None:
        key_mask = key_mask[..., order.tokens] & order.exists
    elif not order.exists.all():
        key_mask = order.exists[None]
    q, k, v = (x[..., order.tokens, :] for x in (q, k, v))
    out = _compiled(q, k, v, key_mask, None, None, sinks, **settings)
    return out[..., order.places, :]


def _sizes(*tensors: Any, **numbers: Any) -> dict[str, int]:
    settings = _of_grid(**numbers)
    return {"rows": settings["down"].size, "columns": settings["across"].size}


_in_grid = Operation(
    _in_blocks,
    cpu=Fast(
        _in_tiles, None, serves=tiles.against, path=f"{trace.CORE}: softmax in tiles",
        why="only keys near some queries of a row are seen",
    ),
    empty=like_queries,
    path="softmax in blocks",
    sizes=_sizes,
)  # fmt: skip


class Order(NamedTuple):
    """An order of tokens in which those that see one another are rows of a small grid, one grid behind another."""

    tokens: Int[Tensor, "places"]
    exists: Bool[Tensor, "places"]  # whether there is a token for the place: the last row of a grid may end early
    places: Int[Tensor, "tokens"]


def _classes(axis: Axis, length: int) -> Int[Tensor, "length"]:
    """Places of an axis see those of the same class only."""
    at = torch.arange(length)
    return at % axis.dilation if axis.slides else (at - axis.shift).div(axis.window, rounding_mode="floor")


def _groups(height: int, width: int, down: Axis, across: Axis) -> Int[Tensor, "tokens"]:
    """The number of every token's group: tokens see those of their own group only."""
    row, column = _classes(down, height), _classes(across, width)
    columns = int(column.max()) - int(column.min()) + 1
    return ((row - row.min())[:, None] * columns + (column - column.min())).flatten()


@lru_cache(256)
def _order(length: int, width: int, leading: int, down: Axis, across: Axis) -> Order | None:
    """The order of tokens; None where they stand in it already."""
    if down.slides and across.slides and down.dilation == across.dilation == 1:
        return None
    height = -(-(length - leading) // width)
    group = _groups(height, width, down, across)
    tokens = torch.cat([torch.arange(leading), leading + group.argsort(stable=True)])
    exists = tokens < length
    if not (down.slides or across.slides):  # whole blocks are seen, so that none need be of full size
        tokens, exists = tokens[exists], exists[exists]
    places = torch.empty_like(tokens).scatter_(0, tokens, torch.arange(len(tokens)))[:length]
    return Order(tokens.clamp(max=length - 1), exists, places)


@lru_cache(256)
def _grid_plan(length: int, width: int, leading: int, down: Axis, across: Axis) -> Plan:
    """Plan of what every token sees, in the order of ``_order``."""
    height = -(-(length - leading) // width)
    order = _order(length, width, leading, down, across)
    total = length if order is None else len(order.tokens)
    rows, ranges = list[tuple[int, ...]](), list[tuple[int, ...]]()

    def add(first: int, last: int, seen: list[tuple[int, ...]], most: int) -> None:
        """Tiles of at most ``most`` of the queries from first to last."""
        last = min(last, total)
        begin, ranges[len(ranges) :] = len(ranges), seen
        rows.extend((row, min(row + most, last), begin, len(ranges)) for row in range(first, last, most))

    before = [(0, leading, -FAR, FAR, 0, 1)] if leading else []
    add(0, leading, [(0, total, -FAR, FAR, 0, 1)], MOST_ROWS)
    sizes = [_classes(axis, n).unique(return_counts=True)[1].tolist() for axis, n in ((down, height), (across, width))]
    start = leading
    if not (down.slides or across.slides):
        group = _groups(height, width, down, across)[: length - leading]
        for count in group.unique(return_counts=True)[1].tolist():
            add(start, start + count, [*before, (start, start + count, -FAR, FAR, 0, 1)], MOST_ROWS)
            start += count
        sizes[0] = []
    for high in sizes[0]:
        for wide in sizes[1]:
            rows_seen = min(down.window, high) if down.slides else high
            columns_seen = min(across.window, wide) if across.slides else wide
            if rows_seen == high and columns_seen == wide:
                add(start, start + high * wide, [*before, (start, start + high * wide, -FAR, FAR, 0, 1)], MOST_ROWS)
                start += high * wide
                continue
            for row in range(high):
                top = min(max(row - rows_seen // 2, 0), high - rows_seen)
                first = start + row * wide
                if columns_seen == wide:
                    seen = [(start + top * wide, start + (top + rows_seen) * wide, -FAR, FAR, 0, 1)]
                    add(first, first + wide, [*before, *seen], MOST_ROWS)
                    continue
                half, seen = columns_seen // 2, []
                for other in range(top, top + rows_seen):
                    at, step = start + other * wide, (other - row) * wide
                    seen.append((at, at + wide, step - half, step + columns_seen - 1 - half, columns_seen, 1))
                add(first, first + wide, [*before, *seen], ROWS)
            start += high * wide
    return Plan(torch.tensor([[rows]], dtype=torch.int32), torch.tensor(ranges, dtype=torch.int32))


def plain_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None,
    *, width: int, leading: int, down: Axis, across: Axis, scale: float,
) -> Tensor:  # fmt: skip
    """Softmax attention of the tokens of a grid, every tile's keys gathered; arguments as in ``grid_softmax``."""
    everything, device = q, q.device
    q = q[..., leading:, :]
    length = q.shape[-2]
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
    near = near[..., row * wide.queries.shape[0] + column, i * across.size + j, :]
    if leading == 0:
        return near
    seen = None if key_mask is None else key_mask[..., None, :].expand(*q.shape[:-2], leading, k.shape[-2])
    attend = fused_attention if sinks is None else partial(open_attention, sinks=sinks)
    return torch.cat((attend(everything[..., :leading, :], k, v, seen, scale=scale), near), -2)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: None, vectors: None, sinks: Tensor | None,
    *, width: int, leading: int, down: Axis, across: Axis, scale: float,
) -> Tensor:  # fmt: skip
    """``plain_softmax`` of tokens in the order of the tiles."""
    places, order = k.shape[-2], _order(k.shape[-2], width, leading, down, across)
    settings: Any = {"width": width, "leading": leading, "down": down, "across": across, "scale": scale}
    if order is None:
        return in_float32(plain_softmax)(q, k, v, key_mask, sinks, **settings)
    back = torch.empty_like(order.tokens).scatter_(0, order.tokens, torch.arange(places))
    mask = None if key_mask is None else key_mask[..., back]
    q, k, v = (x[..., back, :] for x in (q, k, v))
    out = in_float32(plain_softmax)(q, k, v, mask, sinks, **settings)
    return out[..., order.tokens, :]


def _plan(q: Tensor, k: Tensor, *, width: int, leading: int, down: Axis, across: Axis) -> Plan:
    return _grid_plan(k.shape[-2], width, leading, down, across)


_compiled = tiles.operation(_reference, _plan)
