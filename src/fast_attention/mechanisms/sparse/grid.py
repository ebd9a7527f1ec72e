"""Which places of an axis of a grid, its rows or its columns, are computed together, and which they see."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.biases.sinks import SinksMixin
from fast_attention.engine.blocks import count
from fast_attention.mechanism import Attention
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

    def covers(self, length: int) -> bool:
        """Whether every place sees all ``length`` places."""
        return self.window >= length and self.dilation == 1 and self.shift in (SLIDING, 0)

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
        apart, first = self.dilation, self.first
        each = (length - first + apart - 1) // apart
        tiles = apart * (-(-each // self.size) if isinstance(length, int) else count(each, self.size))
        number = torch.arange(tiles, device=device)[:, None]
        start = first + number % apart + number.div(apart, rounding_mode="floor") * self.size * apart
        queries = start + torch.arange(self.size, device=device) * apart
        low, high = self.bounds(queries.clamp(min=0).clamp(max=length - 1), length)
        begin = low[:, :1] if self.slides else start
        keys = begin + torch.arange(self.span, device=device) * apart
        visible = (keys[:, None] >= low[..., None]) & (keys[:, None] < high[..., None])
        return Places(queries, keys, visible)

    def tile_of(self, places: Int[Tensor, "*n"]) -> tuple[Tensor, Tensor]:
        """In which tile each place is, and as which of its queries."""
        residue = (places - self.first) % self.dilation
        number = (places - self.first).div(self.dilation, rounding_mode="floor")
        tile = number.div(self.size, rounding_mode="floor") * self.dilation + residue
        return tile, number % self.size


def visible(length: int, width: int, down: Axis, across: Axis, leading: int, device: torch.device) -> Tensor:
    """The mask of every query for every key (length, length), of which the first ``leading`` are outside the grid."""
    height = -(-(length - leading) // width)
    masks = list[Tensor]()
    for axis, size in ((down, height), (across, width)):
        at = torch.arange(size, device=device)
        low, high = axis.bounds(at, size)
        masks.append((at >= low[:, None]) & (at < high[:, None]) & ((at - at[:, None]) % axis.dilation == 0))
    near = (masks[0][:, None, :, None] & masks[1][None, :, None, :]).flatten(2, 3).flatten(0, 1)
    return F.pad(near, (leading, 0, leading, 0), value=True)[:length, :length]


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
