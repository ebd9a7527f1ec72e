"""The tiles of one head whose queries chose blocks of their past: the tokens that they hold, and their scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.blocks import split_mask
from fast_attention.engine.tiled import flatten
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.sparse.past_blocks import Tiles

TILES = 64  # that are computed together: a few MiB


class Group(NamedTuple):
    """Some tiles of one head: the rows of tokens in them, and the blocks of keys that these are multiplied with."""

    queries: Int[Tensor, "tiles rows"]  # any where a row holds none
    keys: Int[Tensor, "tiles"] | slice  # blocks
    masked: Bool[Tensor, "*#tiles size"] | None
    empty: Bool[Tensor, "tiles rows"] | None  # rows that hold no query; None: there are none

    def read(self, x: Float[Tensor, "length E"], work: Workspace, name: str) -> Float[Tensor, "tiles rows E"]:
        """What belongs to the queries."""
        out = work(name, self.queries.numel(), x.shape[-1])
        return torch.index_select(x, 0, self.queries.flatten(), out=out).view(*self.queries.shape, -1)

    def blocks(self, x: Float[Tensor, "blocks size E"], work: Workspace, name: str) -> Float[Tensor, "tiles size E"]:
        """The blocks of keys, or of values."""
        if isinstance(self.keys, slice):
            return x[self.keys]
        return torch.index_select(x, 0, self.keys, out=work(name, len(self.keys), *x.shape[1:]))

    def add(self, gradient: Float[Tensor, "tiles size E"], into: Float[Tensor, "blocks size E"]) -> None:
        """Add the gradient of what ``blocks`` gave."""
        if isinstance(self.keys, slice):
            into[self.keys] += gradient
        else:
            into.index_add_(0, self.keys, gradient)


class Head(NamedTuple):
    """One head: tokens, keys and values in blocks, and where its tiles lie; the first query is at ``start``."""

    q: Float[Tensor, "length width"]
    k: Float[Tensor, "blocks size width"]
    v: Float[Tensor, "blocks size values"]
    visible: Bool[Tensor, "blocks size"] | None  # None: every key is
    tiles: Tiles | None  # None: no choices
    start: int
    scale: float

    @property
    def front(self) -> int:
        """Positions of the first block before the first query."""
        return self.start % self.k.shape[1]

    @property
    def used(self) -> int:
        """Tiles that hold anything."""
        return 0 if self.tiles is None else int(self.tiles.number)

    @property
    def slots(self) -> Int[Tensor, "entries"]:
        """The row of all tiles in which each choice lies, the last of ``rows`` for none."""
        assert self.tiles is not None
        return self.tiles.slot.masked_fill(~self.tiles.named, self.rows - 1)

    @property
    def rows(self) -> int:
        """Rows of all tiles that are used, and one for what no query chose."""
        return 1 if self.tiles is None else self.used * self.tiles.entry.shape[1] + 1

    def near(self) -> Group:
        """The blocks of queries against the block that they stand in, each query up to itself."""
        size, length = self.k.shape[1], len(self.q)
        blocks = slice(self.start // size, len(self.k))
        ends = (blocks.start * size - self.start, blocks.stop * size - self.start)
        index = torch.arange(*ends, device=self.k.device).view(-1, size)
        empty = None if self.front == 0 and length % size == 0 else (index < 0) | (index >= length)
        masked = ~masks.causal(size, size, self.k.device)[None]
        if self.visible is not None:
            masked = masked | ~self.visible[blocks, None]
        return Group(index.clamp(0, length - 1), blocks, masked, empty)

    def far(self) -> Iterator[tuple[slice, Group]]:
        """The tiles of choices, some at a time, and which rows of all tiles they are."""
        if self.tiles is None:
            return
        entries, rows = len(self.tiles.slot), self.tiles.entry.shape[1]
        for first in range(0, self.used, TILES):
            last = min(first + TILES, self.used)
            entry, block = self.tiles.entry[first:last], self.tiles.block[first:last]
            query = (entry // (entries // len(self.q))).clamp(max=len(self.q) - 1)
            masked = None if self.visible is None else ~self.visible[block][:, None]
            yield slice(first * rows, last * rows), Group(query, block, masked, entry == entries)

    def scores(self, group: Group, work: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        """The scores of some tiles, minus infinity where masked, their queries and their keys."""
        queries, keys = group.read(self.q, work, "q"), group.blocks(self.k, work, "k")
        scores = work("scores", *queries.shape[:2], keys.shape[1])
        torch.baddbmm(scores, queries, keys.mT, beta=0, alpha=self.scale, out=scores)
        return scores if group.masked is None else scores.masked_fill_(group.masked, float("-inf")), queries, keys


def heads(
    q: Tensor, k: Tensor, v: Tensor, choices: Tensor, key_mask: Tensor, *, size: int, start: int, scale: float
) -> Iterator[Head]:
    """Every head of a call, batch by batch."""
    blocks = -(-k.shape[-2] // size)
    visible = None
    if not key_mask.all():
        visible = split_mask(key_mask, size).expand(*k.shape[:-2], blocks, size).reshape(-1, blocks, size)
    tiles = Tiles.of(choices.flatten(0, -3), blocks) if choices.shape[-1] else None
    keys, values = (flatten(x, size).unflatten(1, (-1, size)) for x in (k, v))
    for h, queries in enumerate(flatten(q)):
        each = None if tiles is None else Tiles(*(x[h] for x in tiles))
        yield Head(queries, keys[h], values[h], None if visible is None else visible[h], each, start, scale)
