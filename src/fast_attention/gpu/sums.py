"""Sums over the tokens of every chunk, and of the chunks before or behind each: the states that queries read.

A state is a row of numbers in float32: the products of features and values (D, E), and the sums of features (D) behind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.tiles import NONE, load_mask, round_tf32, row, tile, turned, whole_product


@triton.jit
def chunk_sums(
    X, V, FACTORS, WEIGHTS, DECAYS, VISIBLE, STATES, heads, length, D, E, chunks, offset,
    xb, xh, xt, vb, vh, vt, mb, mh,
    MAP: tl.constexpr, WEIGHTED: tl.constexpr, DECAYED: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``sum_t phi(x_t) v_t^T`` and ``sum_t phi(x_t)`` of each chunk; WEIGHTED: ``factors_t v_t``, ``weights_t``.

    DECAYED: features times ``decays_t``.
    """
    program, parts = tl.program_id(0).to(tl.int64), tl.cdiv(D, BD) * tl.cdiv(E, BE)
    part, at = (program % parts).to(tl.int32), program // parts
    chunk, n = (at % chunks).to(tl.int32), at // chunks
    d, e = part // tl.cdiv(E, BE) * BD, part % tl.cdiv(E, BE) * BE
    X += n // heads * xb + n % heads * xh
    V += n // heads * vb + n % heads * vh
    VISIBLE += n // heads * mb + n % heads * mh
    products, sums = tl.zeros((BD, BE), tl.float32), tl.zeros((BD,), tl.float32)
    for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
        x = turned(X, xt, first, length, d, D, VISIBLE, offset, MAP, HAS_MASK, BT, BD)
        v = tile(V, vt, first, length, e, E, VISIBLE, offset, NONE, HAS_MASK, BT, BE)
        if DECAYED:
            x *= row(DECAYS + n * length, first, length, BT)[None, :]
        x = round_tf32(x, PRECISION)
        if WEIGHTED:
            v *= row(FACTORS + n * length, first, length, BT)[:, None]
            sums += tl.sum(x * row(WEIGHTS + n * length, first, length, BT)[None, :], 1)
            products = whole_product(x, v, products, PRECISION)
        else:
            sums += tl.sum(x, 1)
            products = tl.dot(x, v, products, input_precision=PRECISION)
    STATES += at * (D * E + D)
    columns, values = d + tl.arange(0, BD), e + tl.arange(0, BE)
    inside = (columns < D)[:, None] & (values < E)[None, :]
    tl.store(STATES + columns[:, None] * E + values[None, :], products, mask=inside)
    tl.store(STATES + D * E + columns, sums, mask=(columns < D) & (e == 0))


@triton.jit
def running_sums(
    STATES, FIRST, LAST, TOTALS, BEGINS, numbers, chunks,
    REVERSED: tl.constexpr, HAS_FIRST: tl.constexpr, DECAYED: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every chunk's sums become those of FIRST and the chunks before it (behind it); LAST: all of them.

    DECAYED: what comes from outside a chunk is multiplied by ``totals`` as it passes. PACKED: of the chunks of its own
    sequence; ``begins`` says which are a sequence's first.
    """
    blocks = tl.cdiv(numbers, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    n, columns = program // blocks, (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < numbers
    carry = tl.zeros((BLOCK,), tl.float32)
    if HAS_FIRST:
        carry = tl.load(FIRST + n * numbers + columns, mask=inside, other=0.0)
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSED else step
        where = STATES + (n * chunks + chunk) * numbers + columns
        added = tl.load(where, mask=inside, other=0.0)
        if PACKED and not REVERSED:
            carry = tl.where(tl.load(BEGINS + chunk) != 0, 0.0, carry)
        tl.store(where, carry, mask=inside)
        if DECAYED:
            carry *= tl.load(TOTALS + n * chunks + chunk)
        carry += added
        if PACKED and REVERSED:
            carry = tl.where(tl.load(BEGINS + chunk) != 0, 0.0, carry)
    tl.store(LAST + n * numbers + columns, carry, mask=inside)


@triton.jit
def row_products(
    OUT, REST, GRAD, FACTORS, WEIGHTS, heads, length, E, gb, gh, gt,
    HAS_REST: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``-factors_t (grad_t . out_t)``, the gradients of the denominators: of outputs before they were rounded."""
    blocks = tl.cdiv(length, BT)
    program = tl.program_id(0).to(tl.int64)
    n, first = program // blocks, (program % blocks).to(tl.int32) * BT
    GRAD += n // heads * gb + n % heads * gh
    total = tl.zeros((BT,), tl.float32)
    for e in range(0, E, BE):
        g = tile(GRAD, gt, first, length, e, E, GRAD, 0.0, NONE, False, BT, BE)
        out = tile(OUT + n * length * E, E, first, length, e, E, OUT, 0.0, NONE, False, BT, BE)
        if HAS_REST:
            out += tile(REST + n * length * E, E, first, length, e, E, OUT, 0.0, NONE, False, BT, BE)
        total += tl.sum(g * out, 1)
    rows = first + tl.arange(0, BT)
    factors = row(FACTORS + n * length, first, length, BT)
    tl.store(WEIGHTS + n * length + rows, -factors * total, mask=load_mask(OUT, first, length, False, BT))
