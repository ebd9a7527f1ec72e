"""Softmax over the keys near a query and a few global ones, under one normaliser, by the compiled core.

This is the pattern of Longformer and LED: a query sees a window of keys, and keys that every query sees. BigBird adds
blocks that are drawn at random for each block of queries.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention import core
from fast_attention.engine import tiles
from fast_attention.engine.tiles import FAR, MOST_ROWS, ROWS, Plan


def form(runs: str, shortest: int) -> tuple[str, int | None]:
    """Describe what runs, and from how many tokens on; None where no length runs anything new."""
    if why := core.unavailable():
        return f"what ran before: tiles need the compiled core ({why})", None
    return runs, shortest


def attend(
    q: Float[Tensor, "heads length width"],
    k: Float[Tensor, "heads length width"],
    v: Float[Tensor, "heads length width"],
    *,
    scale: float,
    reach: int,
    size: int = 0,
    masked: Bool[Tensor, "length"] | None = None,
    columns: Int[Tensor, "number"] | None = None,
    blocks: Int[Tensor, "heads queries choices"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "heads length width"]:
    """Softmax attention over a window and global keys.

    Args:
        q: Queries; as keys and values one sequence, with heads in front.
        k: Keys.
        v: Values.
        scale: Factor on the dot products.
        reach: Keys that are near, on each side of a query, or of its whole block of ``size`` queries.
        size: Queries of a block; 0: each by itself.
        masked: Keys that no query sees: padding.
        columns: Positions of the keys that every query sees, and sees once, also where a window holds them.
        blocks: Numbers of the blocks of ``size`` keys that a block of queries sees besides. A key counts once
            more for each block that names it.
        dropout: The share of weights that are set to zero.
    """
    settings: Any = {"reach": reach, "size": size, "columns": ()}
    if columns is not None:
        settings["columns"] = tuple(_intervals(columns.tolist()))
    tables = () if blocks is None else (blocks,)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    mask = None if masked is None else ~masked[None]
    return _compiled(q, k, v, mask, None, None, None, *tables, scale=scale, dropout=dropout, seed=seed, **settings)


Interval = tuple[int, int]  # first position, and one behind the last


def _intervals(positions: list[int]) -> list[Interval]:
    """Sorted positions as runs of neighbours."""
    runs = list[Interval]()
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def _plan(
    q: Tensor, k: Tensor, blocks: Tensor | None = None, *, reach: int, size: int, columns: tuple[Interval, ...]
) -> Plan:
    if blocks is not None:
        return _with_blocks(q.shape[-2], blocks, reach, size, columns)
    return _of_all_heads(q.shape[-2], reach, size, columns)


@lru_cache(64)
def _of_all_heads(length: int, reach: int, size: int, columns: tuple[Interval, ...]) -> Plan:
    """The plan of a window and global keys, which all heads share."""
    rows, ranges = list[list[int]](), list[list[int]]()
    for row, end in _rows(length, size):
        first = len(ranges)
        ranges += _near(row, end, length, reach, size, columns)
        rows.append([row, end, first, len(ranges)])
    return Plan(torch.tensor([[rows]], dtype=torch.int32), torch.tensor(ranges, dtype=torch.int32))


def _rows(length: int, size: int) -> list[Interval]:
    """The queries of every tile; a tile lies in one block."""
    step = ROWS if size == 0 else -(-size // -(-size // MOST_ROWS))
    block = size or length
    starts = (row for first in range(0, length, block) for row in range(first, min(first + block, length), step))
    return [(row, min(row + step, (row // block + 1) * block, length)) for row in starts]


def _near(row: int, end: int, length: int, reach: int, size: int, columns: tuple[Interval, ...]) -> list[list[int]]:
    """The ranges of a tile: global keys, and between them what is near."""
    if size:
        low, high, band = row // size * size - reach, (row // size + 1) * size + reach, (-FAR, FAR)
    else:
        low, high, band = row - reach, end + reach, (-reach, reach)
    low, high = max(low, 0), min(high, length)
    ranges, at = list[list[int]](), low
    for first, last in columns:
        if at < min(first, high):
            ranges.append([at, min(first, high), *band, 0, 1])
        ranges.append([first, last, -FAR, FAR, 0, 1])
        at = max(at, last)
    if at < high:
        ranges.append([at, high, *band, 0, 1])
    return ranges


def _with_blocks(length: int, blocks: Tensor, reach: int, size: int, columns: tuple[Interval, ...]) -> Plan:
    """The plan of blocks of queries that see further blocks of keys, each head its own."""
    rows, ranges = list[list[list[int]]](), list[list[int]]()
    for of_head in blocks.tolist():
        rows.append([])
        for row, end in _rows(length, size):
            counts = [0] * (length // size)  # how often the keys of each block count
            for first, last, *_ in _near(row, end, length, reach, size, columns):
                for block in range(first // size, last // size):
                    counts[block] += 1
            for block in of_head[row // size]:
                counts[block] += 1
            begin = len(ranges)
            ranges += [[i * size, (i + 1) * size, -FAR, FAR, 0, count] for i, count in enumerate(counts) if count]
            rows[-1].append([row, end, begin, len(ranges)])
    return Plan(torch.tensor([rows], dtype=torch.int32), torch.tensor(ranges, dtype=torch.int32))


_compiled = tiles.operation(None, _plan)
