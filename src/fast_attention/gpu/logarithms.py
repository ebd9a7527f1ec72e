"""Logarithms of features, made of tokens inside a kernel: features are never held in memory.

With W the rows of a projection (D, width) and x a token, ``scale W x + bias``, and for keys ``- (scale |x|)^2 / 2``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from fast_attention.gpu.tiles import FLOOR, load_mask, row

SLACK = tl.constexpr(40.0)  # how far the logarithms of a block's keys may lie apart: beyond, pairs are taken one by one
NOTHING = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def tokens(pointer, stride, first, length, width, visible, BT: tl.constexpr, BW: tl.constexpr):
    """Tokens ``first`` on, (BT, BW), as they lie in memory."""
    rows, columns = first + tl.arange(0, BT), tl.arange(0, BW)
    inside = load_mask(visible, first, length, BT)[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def turned_tokens(pointer, stride, first, length, width, visible, BT: tl.constexpr, BW: tl.constexpr):
    """Load a tile of tokens as columns, (BW, BT)."""
    rows, columns = first + tl.arange(0, BT), tl.arange(0, BW)
    inside = (columns < width)[:, None] & load_mask(visible, first, length, BT)[None, :]
    return tl.load(pointer + rows.to(tl.int64)[None, :] * stride + columns[:, None], mask=inside, other=0.0)


@triton.jit
def product(a, b):
    """A product of tokens and rows with all their digits; the interpreter has no product of bfloat16."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    elif INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def of_tokens(
    x, ROWS, BIAS, d, D, width, lower, scale, beyond,
    HALF: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Logarithms ``d`` on of tokens x (tokens, BW), (tokens, BD); ``beyond`` where there is no such feature.

    Rows for tokens of sixteen bits are two numbers of such each, what rounding took ``lower`` numbers behind.
    """
    z = product(x, turned_tokens(ROWS, width, d, D, width, None, BD, BW))
    if x.dtype != tl.float32:
        z += product(x, turned_tokens(ROWS + lower, width, d, D, width, None, BD, BW))
    z *= scale
    if BIAS is not None:
        z += row(BIAS, d, D, BD)[None, :]
    if HALF:
        x = x.to(tl.float32)
        z -= tl.sum(x * x, 1)[:, None] * (0.5 * scale * scale)
    return tl.where((d + tl.arange(0, BD) < D)[None, :], z, beyond)


@triton.jit
def turned_of_tokens(
    x, ROWS, BIAS, d, D, width, lower, scale, beyond,
    HALF: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Logarithms of features of tokens x (BW, tokens), as (BD, tokens): products need no transpose."""
    z = product(tokens(ROWS, width, d, D, width, None, BD, BW), x)
    if x.dtype != tl.float32:
        z += product(tokens(ROWS + lower, width, d, D, width, None, BD, BW), x)
    z *= scale
    if BIAS is not None:
        z += row(BIAS, d, D, BD)[:, None]
    if HALF:
        x = x.to(tl.float32)
        z -= tl.sum(x * x, 0)[None, :] * (0.5 * scale * scale)
    return tl.where((d + tl.arange(0, BD) < D)[:, None], z, beyond)


@triton.jit
def rows_of(ROWS, d, D, width, lower, BD: tl.constexpr, BW: tl.constexpr):
    """Rows ``d`` on, (BD, BW), in float32."""
    rows = tokens(ROWS, width, d, D, width, None, BD, BW).to(tl.float32)
    if ROWS.dtype.element_ty != tl.float32:
        rows += tokens(ROWS + lower, width, d, D, width, None, BD, BW).to(tl.float32)
    return rows


@triton.jit
def exceeds_range(z, is_visible, axis: tl.constexpr):
    """Whether the logarithms of a block's keys lie too far apart for one scale a feature."""
    top = tl.max(tl.where(is_visible, z, FLOOR), axis)
    low = tl.min(tl.where(is_visible, z, -FLOOR), axis)
    return tl.max(top - low, 0) > SLACK


@triton.jit
def first_seen(visible, first, length, ROWS: tl.constexpr):
    """The first token of a block that is is_visible, from the block's begin; ROWS where none is."""
    is_visible = load_mask(visible, first, length, ROWS)
    return tl.min(tl.where(is_visible, tl.arange(0, ROWS), ROWS), 0)


@triton.jit
def column(x, at, COLUMNS: tl.constexpr):
    """Column ``at`` of a tile."""
    return tl.sum(tl.where((tl.arange(0, COLUMNS) == at)[None, :], x, 0.0), 1)


@triton.jit
def line(x, at, ROWS: tl.constexpr):
    """Row ``at`` of a tile."""
    return tl.sum(tl.where((tl.arange(0, ROWS) == at)[:, None], x, 0.0), 0)
