"""Parts of all kernels: places of programs, tiles of tokens in float32, feature maps and their slopes, states.

Pointers stand at the sequence and head of a program already; offsets are 64 bits wide. What lies outside is read as
zeros, and of tokens that a key mask hides nothing is read, so that no NaN of theirs gets in. What a call does not have,
a mask say, is None, and kernels are compiled without it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu import maps

NONE, ELU, RELU = (tl.constexpr(number) for number in (maps.NONE, maps.ELU, maps.RELU))
EXPONENTIAL = tl.constexpr(maps.EXPONENTIAL)
FLOOR, SMALLEST = tl.constexpr(maps.FLOOR), tl.constexpr(maps.SMALLEST)


@triton.jit
def place(length, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Place of a program: its sequence and head, first token and first column; 64 bits wide but for the last two."""
    blocks, parts = tl.cdiv(length, ROWS), tl.cdiv(width, COLUMNS)
    program = tl.program_id(0).to(tl.int64)
    at = program // parts
    return at // blocks, (at % blocks).to(tl.int32) * ROWS, (program % parts).to(tl.int32) * COLUMNS


@triton.jit
def of_head(pointer, n, heads, of_batch, of_heads):
    """A pointer to the tokens, or to the mask if there is one, of a sequence and head."""
    if pointer is None:
        return None
    else:
        return pointer + n // heads * of_batch + n % heads * of_heads


@triton.jit
def feature(x, offset, MAP: tl.constexpr):
    """The elementwise map of every number."""
    if MAP == ELU:
        return tl.where(x > 0, x + 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif MAP == RELU:
        return tl.maximum(x, 0.0) + offset
    else:
        return x


@triton.jit
def slope(x, MAP: tl.constexpr):
    """The derivative of the map."""
    if MAP == ELU:
        return tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif MAP == RELU:
        return tl.where(x > 0, 1.0, 0.0)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def of_weights(pointer, n, heads, rows, width):
    """A pointer to what a head has for all sequences, (rows, width), if there is any."""
    if pointer is None:
        return None
    else:
        return pointer + n % heads * rows * width


@triton.jit
def load_mask(visible, first, length, ROWS: tl.constexpr):
    """Which tokens exist and may be seen, (ROWS)."""
    rows = first + tl.arange(0, ROWS)
    if visible is not None:
        return tl.load(visible + rows, mask=rows < length, other=0) != 0
    else:
        return rows < length


@triton.jit
def tile(
    pointer, stride, first, length, column, width, visible, offset,
    MAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tokens ``first`` on and their columns ``column`` on, (ROWS, COLUMNS), as they are or their features."""
    rows, columns = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = load_mask(visible, first, length, ROWS)[:, None] & (columns < width)[None, :]
    x = tl.load(pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    return tl.where(inside, feature(x.to(tl.float32), offset, MAP), 0.0)


@triton.jit
def turned(
    pointer, stride, first, length, column, width, visible, offset,
    MAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load a tile with tokens as columns, (COLUMNS, ROWS), by the order of its loads: products need no transpose."""
    rows, columns = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (columns < width)[:, None] & load_mask(visible, first, length, ROWS)[None, :]
    x = tl.load(pointer + rows.to(tl.int64)[None, :] * stride + columns[:, None], mask=inside, other=0.0)
    return tl.where(inside, feature(x.to(tl.float32), offset, MAP), 0.0)


@triton.jit
def round_tf32(x, PRECISION: tl.constexpr):
    """Numbers to the digits that tensor cores read of them: sums of them are then sums of what products are made of."""
    if PRECISION == "tf32":
        rounded = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)  # the bits of a NaN may round to those of a zero
    else:
        return x


@triton.jit
def whole_product(x, y, total, PRECISION: tl.constexpr):
    """``total + x y`` where x has no more digits than TF32: two products keep those of y as well.

    For outputs and gradients of queries and keys: little is left of the latter's largest parts, which cancel.
    """
    if PRECISION == "tf32":
        high = round_tf32(y, PRECISION)
        total = tl.dot(x, y - high, total, input_precision=PRECISION)
        return tl.dot(x, high, total, input_precision=PRECISION)
    else:
        return tl.dot(x, y, total, input_precision=PRECISION)


@triton.jit
def row(pointer, first, length, ROWS: tl.constexpr):
    """Numbers ``first`` on of a row, (ROWS)."""
    rows = first + tl.arange(0, ROWS)
    return tl.load(pointer + rows, mask=rows < length, other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, stride, first, length, column, width, values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write a tile of tokens."""
    rows, columns = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    where = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointer + where, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def store_row(pointer, first, length, values, ROWS: tl.constexpr):
    """Write the sums over columns of a tile of tokens."""
    rows = first + tl.arange(0, ROWS)
    tl.store(pointer + rows, tl.sum(values, 1), mask=rows < length)


@triton.jit
def numbers(D, E, SCALED: tl.constexpr):
    """How many numbers a state has."""
    if SCALED:
        return D * E + 2 * D
    else:
        return D * E + D


@triton.jit
def load_sums(STATE, d, D, E, SCALED: tl.constexpr, BD: tl.constexpr):
    """Sums of features, and SCALED the logarithms of what they and their products are divided by."""
    scales, columns = tl.full((BD,), FLOOR, tl.float32), d + tl.arange(0, BD)
    if SCALED:
        scales = tl.load(STATE + D * E + D + columns, mask=columns < D, other=FLOOR)
    return row(STATE + D * E, d, D, BD), scales


@triton.jit
def store_state(
    STATE, d, D, e, E, products, sums, scales, SCALED: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Write a tile of products, and beside the first of a row the rest."""
    columns, values = d + tl.arange(0, BD), e + tl.arange(0, BE)
    inside = (columns < D)[:, None] & (values < E)[None, :]
    tl.store(STATE + columns[:, None] * E + values[None, :], products, mask=inside)
    tl.store(STATE + D * E + columns, sums, mask=(columns < D) & (e == 0))
    if SCALED:
        tl.store(STATE + D * E + D + columns, scales, mask=(columns < D) & (e == 0))
