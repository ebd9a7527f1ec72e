"""Logarithms of features, made of tokens inside a kernel: features are never held in memory.

With W the rows of a projection (D, width) and x a token, ``scale W x + bias``, and for keys ``- (scale |x|)^2 / 2``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.tiles import NONE, known, row, tile, turned

FLOOR = tl.constexpr(-1e30)  # the logarithm of nothing, as in ``engine.scan``
SLACK = tl.constexpr(40.0)  # how far the logarithms of a block's keys may lie apart: beyond, pairs are taken one by one
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def of_tokens(
    x, ROWS, BIAS, d, D, width, scale, beyond,
    HALF: tl.constexpr, HAS_BIAS: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Logarithms ``d`` on of tokens x (tokens, BW), (tokens, BD); ``beyond`` where there is no such feature."""
    rows = turned(ROWS, width, d, D, 0, width, ROWS, 0.0, NONE, False, BD, BW)
    z = tl.dot(x, rows, input_precision="tf32x3") * scale
    if HAS_BIAS:
        z += row(BIAS, d, D, BD)[None, :]
    if HALF:
        z -= tl.sum(x * x, 1)[:, None] * (0.5 * scale * scale)
    return tl.where((d + tl.arange(0, BD) < D)[None, :], z, beyond)


@triton.jit
def turned_of_tokens(
    x, ROWS, BIAS, d, D, width, scale, beyond,
    HALF: tl.constexpr, HAS_BIAS: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The same of tokens x (BW, tokens), (BD, tokens): products need no transpose."""
    rows = tile(ROWS, width, d, D, 0, width, ROWS, 0.0, NONE, False, BD, BW)
    z = tl.dot(rows, x, input_precision="tf32x3") * scale
    if HAS_BIAS:
        z += row(BIAS, d, D, BD)[:, None]
    if HALF:
        z -= tl.sum(x * x, 0)[None, :] * (0.5 * scale * scale)
    return tl.where((d + tl.arange(0, BD) < D)[:, None], z, beyond)


@triton.jit
def apart(z, seen, axis: tl.constexpr):
    """Whether the logarithms of a block's keys lie too far apart for one scale a feature; ``seen`` as z is shaped."""
    top = tl.max(tl.where(seen, z, FLOOR), axis)
    low = tl.min(tl.where(seen, z, -FLOOR), axis)
    return tl.max(top - low, 0) > SLACK


@triton.jit
def first_seen(visible, first, length, HAS_MASK: tl.constexpr, ROWS: tl.constexpr):
    """The first token of a block that is seen, from the block's begin; ROWS where none is."""
    seen = known(visible, first, length, HAS_MASK, ROWS)
    return tl.min(tl.where(seen, tl.arange(0, ROWS), ROWS), 0)


@triton.jit
def column(x, at, COLUMNS: tl.constexpr):
    """Column ``at`` of a tile."""
    return tl.sum(tl.where((tl.arange(0, COLUMNS) == at)[None, :], x, 0.0), 1)


@triton.jit
def line(x, at, ROWS: tl.constexpr):
    """Row ``at`` of a tile."""
    return tl.sum(tl.where((tl.arange(0, ROWS) == at)[:, None], x, 0.0), 0)
