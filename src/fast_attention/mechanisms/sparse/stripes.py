"""Stripes of a grid: a few of its columns, so that the tokens of neighbouring rows lie one behind another.

A stripe of keys holds the columns that a stripe of queries reads, so neighbouring ones share some. Leading tokens stand
before the columns of every row. A dilated window's rows are ordered so that those which it sees are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from fast_attention.engine.tiling import Memory
from fast_attention.mechanisms.sparse.grid import Axis

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
    for queries, keys, visible in zip(*axis.places(length, torch.device("cpu")), strict=True):
        inside = ((queries >= 0) & (queries < length)).nonzero()[:, 0]
        for some in inside.split(axis.tile) if len(inside) else ():
            read = visible[some].any(0).nonzero()[:, 0]
            ends = (int(queries[some[0]]), int(keys[read[0]]))
            first, first_key = (moves[at % axis.dilation][1].start + at // axis.dilation for at in ends)
            tiles.append(Rows(first, first_key, visible[some][:, read]))
    return tiles


def columns(axis: Axis, length: int) -> list[Columns]:
    """The columns of all stripes."""
    stripes = list[Columns]()
    for queries, keys, visible in zip(*axis.places(length, torch.device("cpu")), strict=True):
        if ((queries >= 0) & (queries < length)).any():
            moves = (_move(x, length, axis.dilation) for x in (queries, keys))
            stripes.append(Columns(next(moves), next(moves), visible))
    return stripes


def _move(places: Int[Tensor, "size"], length: int, apart: int) -> Move:
    """Those of the places that lie inside the axis."""
    inside = ((places >= 0) & (places < length)).nonzero()[:, 0]
    first, last = int(inside[0]), int(inside[-1])
    return slice(int(places[first]), int(places[last]) + 1, apart), slice(first, last + 1)
