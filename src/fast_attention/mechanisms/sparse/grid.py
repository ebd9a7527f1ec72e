"""Softmax over parts of a grid of tokens, an image's or a spectrogram's, row by row: windows or blocks of its axes."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.biases.sinks import SinksMixin
from fast_attention.engine import tiles, trace
from fast_attention.engine.blocks import count
from fast_attention.engine.fused import blockwise_softmax, fused_attention, open_attention
from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.tiles import FAR, MOST_ROWS, ROWS, Plan
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.value import at_least

SLIDING = -1  # in place of where blocks begin


class Places(NamedTuple):
    """The places of an axis by tiles: those of queries, those of the keys that they read, and which they see.

    Places outside the axis belong to no token.
    """

    queries: Int[Tensor, "tiles size"]
    keys: Int[Tensor, "tiles span"]
    visible: Bool[Tensor, "tiles size span"]


class Axis(NamedTuple):
    """A neighbourhood along one axis: a sliding window of places so far apart, or a block.

    A window of ``window`` places is centred where it fits, and moved inwards at the ends. Blocks of as many places
    begin at ``shift``; what is cut off at the ends are smaller blocks. ``tile`` places are computed together, as far as
    whole blocks allow: speed only.
    """

    window: int
    dilation: int = 1
    shift: int = SLIDING
    tile: int = 8

    @property
    def slides(self) -> bool:
        """Whether each place has a window of its own."""
        return self.shift == SLIDING

    @property
    def size(self) -> int:
        """Places of queries in a tile."""
        return self.tile if self.slides else self.window * max(self.tile // self.window, 1)

    @property
    def span(self) -> int:
        """Places of keys in a tile."""
        return self.size + self.window - 1 if self.slides else self.size

    @property
    def first(self) -> int:
        """The place at which the first tile begins."""
        return self.shift - self.size if self.shift > 0 else 0

    def covers(self, length: int, some: int | None = None) -> bool:
        """Whether every one of ``length`` places sees all, or every one of the first ``some`` all of these."""
        near = self.window >= length or (some or length) <= (self.window // 2 + 1 if self.slides else self.window)
        return near and self.dilation == 1 and self.shift in (SLIDING, 0)

    def within(self, length: int) -> Axis:
        """The axis for ``length`` places, with a window no larger than what is there."""
        return self._replace(window=min(self.window, length)) if self.shift in (SLIDING, 0) else self

    def bounds(self, places: Int[Tensor, "*n"], length: int) -> tuple[Tensor, Tensor]:
        """The first place that each place sees, and one behind the last."""
        if not self.slides:
            low = places - (places - self.shift) % self.window
            return low.clamp(min=0), (low + self.window).clamp(max=length)
        residue, number = places % self.dilation, places.div(self.dilation, rounding_mode="floor")
        among = (length - residue + self.dilation - 1).div(self.dilation, rounding_mode="floor")
        start = torch.minimum(number - self.window // 2, among - self.window).clamp(min=0)
        low = residue + start * self.dilation
        return low, (low + self.window * self.dilation).clamp(max=length)

    def places(self, length: int, device: torch.device) -> Places:
        """All tiles of an axis of ``length`` places; those of a dilated window hold places so far apart."""
        step, first = self.dilation, self.first
        each = (length - first + step - 1) // step
        tiles = step * (-(-each // self.size) if isinstance(length, int) else count(each, self.size))
        number = torch.arange(tiles, device=device)[:, None]
        start = first + number % step + number.div(step, rounding_mode="floor") * self.size * step
        queries = start + torch.arange(self.size, device=device) * step
        low, high = self.bounds(queries.clamp(min=0).clamp(max=length - 1), length)
        begin = low[:, :1] if self.slides else start
        keys = begin + torch.arange(self.span, device=device) * step
        visible = (keys[:, None] >= low[..., None]) & (keys[:, None] < high[..., None])
        return Places(queries, keys, visible)

    def tile_of(self, places: Int[Tensor, "*n"]) -> tuple[Tensor, Tensor]:
        """In which tile each place is, and as which of its queries."""
        residue = (places - self.first) % self.dilation
        number = (places - self.first).div(self.dilation, rounding_mode="floor")
        tile = number.div(self.size, rounding_mode="floor") * self.dilation + residue
        return tile, number % self.size


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
    last of which may end early. The exponentials of ``sinks`` (H,) add to normalisers.
    """
    length = q.shape[-2]
    if not symbolic():
        height = -(-(length - leading) // width)
        if height <= 0 or (down.covers(height) and across.covers(width, min(width, length - leading))):
            return softmax_attention(q, k, v, key_mask=key_mask, scale=scale, sinks=sinks)
        down, across = down.within(height), across.within(width)
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return _in_grid(q, k, v, key_mask, sinks, width=width, down=down, across=across, leading=leading, scale=factor)


def _in_tiles(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None, *, width: int, down: Axis,
    across: Axis, leading: int, scale: float,
) -> Tensor:  # fmt: skip
    sizes = {"width": width, "leading": leading, "down": Axis(*down), "across": Axis(*across)}
    order = _order(q.shape[-2], **sizes)
    if order is None:
        return _compiled(q, k, v, key_mask, None, None, sinks, **sizes, scale=scale)
    if key_mask is not None:
        key_mask = key_mask[..., order.tokens] & order.exists
    elif not order.exists.all():
        key_mask = order.exists[None]
    q, k, v = (x[..., order.tokens, :] for x in (q, k, v))
    return _compiled(q, k, v, key_mask, None, None, sinks, **sizes, scale=scale)[..., order.places, :]


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
    return ((row - row.min())[:, None] * width + (column - column.min())).flatten()


@lru_cache(256)
def _order(length: int, width: int, leading: int, down: Axis, across: Axis) -> Order | None:
    """The order of tokens; None where they stand in it already."""
    if down.slides and across.slides and down.dilation == across.dilation == 1:
        return None
    height = -(-(length - leading) // width)
    tokens = torch.cat([torch.arange(leading), leading + _groups(height, width, down, across).argsort(stable=True)])
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
    start, slides = leading, down.slides or across.slides
    classes = _classes(down, height), _classes(across, width)
    if not slides:
        classes = torch.zeros(1), _groups(height, width, down, across)[: length - leading]
    for high, wide in product(*(each.unique(return_counts=True)[1].tolist() for each in classes)):
        rows_seen, columns_seen = min(down.window, high), min(across.window, wide)
        if not slides or (rows_seen == high and columns_seen == wide):
            add(start, start + high * wide, [*before, (start, start + high * wide, -FAR, FAR, 0, 1)], MOST_ROWS)
        else:
            half = columns_seen // 2
            for row in range(high):
                first, top = start + row * wide, min(max(row - rows_seen // 2, 0), high - rows_seen)
                steps = [(other - row) * wide for other in range(top, top + rows_seen)]
                seen = [
                    (first + step, first + step + wide, step - half, step + columns_seen - 1 - half, columns_seen, 1)
                    for step in steps
                ]
                add(first, first + wide, [*before, *seen], ROWS)
        start += high * wide
    return Plan(torch.tensor([[rows]], dtype=torch.int32), torch.tensor(ranges, dtype=torch.int32))


def plain_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None,
    *, width: int, leading: int, down: Axis, across: Axis, scale: float,
) -> Tensor:  # fmt: skip
    """Softmax attention of the tokens of a grid, every tile's keys gathered; arguments as in ``grid_softmax``."""
    down, across = Axis(*down), Axis(*across)  # plain tuples in a compiler's node
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
    near = blockwise_softmax(q[..., queries, :], k[..., keys, :], v[..., keys, :], visible, scale=scale, sinks=sinks)
    at = torch.arange(length, device=device)
    (row, i), (column, j) = down.tile_of(at.div(width, rounding_mode="floor")), across.tile_of(at % width)
    near = near[..., row * wide.queries.shape[0] + column, i * across.size + j, :]
    if leading == 0:
        return near
    seen = None if key_mask is None else key_mask[..., None, :].expand(*q.shape[:-2], leading, k.shape[-2])
    attend = fused_attention if sinks is None else partial(open_attention, sinks=sinks)
    return torch.cat((attend(everything[..., :leading, :], k, v, seen, scale=scale), near), -2)


_compiled = tiles.operation(None, lambda q, k, **sizes: _grid_plan(k.shape[-2], **sizes))  # second derivatives alone
_in_grid = Operation(
    plain_softmax,
    cpu=Fast(
        _in_tiles, None, serves=tiles.against, path=f"{trace.CORE}: softmax in tiles",
        why="only keys near some queries of a row are seen",
    ),
    empty=like_queries,
    path="softmax in blocks",
    sizes=lambda *tensors, down, across, **others: {"rows": Axis(*down).size, "columns": Axis(*across).size},
)  # fmt: skip


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """A setting for rows and for columns."""
    return value if isinstance(value, tuple) else (value, value)


class InGrid(SinksMixin, Attention[Any, None]):  # type: ignore[reportIncompatibleVariableOverride]
    """An attention among the tokens of a grid, row by row, behind ``num_prefix_tokens`` others."""

    height: int | None
    width: int
    num_prefix_tokens: int

    def __post_init__(self) -> None:
        """Check the sizes of the grid."""
        if self.height is not None:
            at_least(self, "height", self.height, 1)
        at_least(self, "width", self.width, 1)
        at_least(self, "num_prefix_tokens", self.num_prefix_tokens, 0)

    def check_sides(self, setting: str, least: int) -> None:
        """Raise a ``ValueError`` unless a setting is a number, or a pair for rows and columns, of at least that."""
        value = getattr(self, setting)
        sides = pair(value)
        if len(sides) != 2 or not all(isinstance(side, int) and side >= least for side in sides):
            call = f"{type(self).__name__}({setting}={value!r})"
            raise ValueError(f"{call}: {setting} must be a number >= {least}, or a pair (rows, columns)")

    def check_length(self, length: int) -> None:
        """Raise a ``ValueError`` unless so many tokens are the grid and its prefix."""
        if self.height is None:
            return
        tokens = self.height * self.width + self.num_prefix_tokens
        if length != tokens:
            prefix = f" behind the first {self.num_prefix_tokens}" if self.num_prefix_tokens else ""
            raise ValueError(
                f"{self!r} is for {tokens} tokens, {self.height} rows of {self.width}{prefix}, and got {length}: give "
                "the grid's own height and width (and num_prefix_tokens), or height=None for any number of rows"
            )
