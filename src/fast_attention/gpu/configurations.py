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
    16: Configuration(chunk=256, block=64, columns=16, values=16, warps=4, stages=2),
    32: Configuration(chunk=256, block=64, columns=32, values=32, warps=8, stages=2),
    64: Configuration(chunk=256, block=64, columns=64, values=64, warps=8, stages=2),
    128: Configuration(chunk=256, block=64, columns=64, values=64, warps=8, stages=2),
    256: Configuration(chunk=256, block=64, columns=64, values=64, warps=8, stages=2),
}
WIDEST = max(TABLE)

# Exponential features, by whether products keep float32's digits; columns are features. Heads of more numbers than
# WIDEST_PROJECTED would not lie whole in a program.
EXPONENTIAL = {
    False: Configuration(chunk=256, block=64, columns=64, values=64, warps=8, stages=1),
    True: Configuration(chunk=256, block=32, columns=32, values=64, warps=4, stages=1),
}
WIDEST_PROJECTED = 128


def configuration(width: int, values: int, *, exact: bool) -> Configuration:
    """The row for heads of ``width`` features and ``values`` values; neither is wider than ``WIDEST``.

    Args:
        width: Features of a head.
        values: Values of a head.
        exact: Products with float32's digits, which take three passes and more registers: blocks of half the tokens.
    """
    row = TABLE[next(size for size in TABLE if size >= max(width, values))]
    return row._replace(block=row.block // 2) if exact else row
