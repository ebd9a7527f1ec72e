"""Sizes of tiles by the widths of heads: one table, compiled ahead of time in the tests; none is tuned at run time."""

from __future__ import annotations

from typing import NamedTuple


class Configuration(NamedTuple):
    """Tokens of a chunk and of a block, columns of queries and of values at a time, warps and stages."""

    chunk: int
    block: int
    columns: int
    values: int
    warps: int
    stages: int


TABLE = {  # by the larger of the two widths, rounded up to a power of two
    size: Configuration(256, 64, min(size, 64), min(size, 64), warps=4 if size == 16 else 8, stages=2)
    for size in (16, 32, 64, 128, 256)
}
WIDEST = max(TABLE)
STEP = 32  # features and values of a state that decoding takes at a time


def configuration(width: int, values: int, *, exact: bool) -> Configuration:
    """The row for heads of ``width`` features and ``values`` values; features beyond ``WIDEST`` take no other tiles.

    Args:
        width: Features of a head.
        values: Values of a head.
        exact: Products with float32's digits, which take three passes and more registers: blocks of half the tokens.
    """
    row = TABLE[next(size for size in TABLE if size >= min(max(width, values), WIDEST))]
    return row._replace(block=row.block // 2) if exact else row


class Sizes(NamedTuple):
    """Sizes of the forward pass and of the backward; of exponentials ``columns`` are made at a time."""

    forward: Configuration
    backward: Configuration


def _directions(block: int, columns: int, warps: int, backward: int | None = None) -> Sizes:
    row = Configuration(chunk=128, block=block, columns=columns, values=32, warps=warps, stages=1)
    return Sizes(row, row._replace(block=backward or block))


EXPONENTIAL = {  # by the width of heads, and whether products keep float32's digits
    (64, False): _directions(64, 32, 8, backward=32),
    (128, False): _directions(32, 16, 8),
    (64, True): _directions(16, 32, 4),
    (128, True): _directions(16, 32, 8),
}
WIDEST_PROJECTED = max(width for width, _ in EXPONENTIAL)


def exponential(width: int, *, exact: bool) -> Sizes:
    """The row for heads of ``width`` numbers, at most ``WIDEST_PROJECTED``; ``exact`` as in ``configuration``."""
    return EXPONENTIAL[64 if width <= 64 else WIDEST_PROJECTED, exact]
