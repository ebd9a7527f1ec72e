"""Sums over the tokens of every chunk, and of the chunks before or behind each, every feature over its largest term.

A state is a row of numbers in float32: products of features and values (D, E), sums of features (D), and the logarithms
of what both are divided by (D).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.exponential.tiles import FLOOR, NOTHING, turned_of_tokens, turned_tokens
from fast_attention.gpu.tiles import NONE, load_mask, round_tf32, row, tile, whole_product


@triton.jit
def chunk_sums(
    X, ROWS, BIAS, V, SHIFTS, FACTORS, WEIGHTS, VISIBLE, STATES, heads, length, D, width, E, chunks, lower, scale,
    xb, xh, xt, vb, vh, vt, mb, mh,
    QUERIES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``sum_t e^(b_t - c) v_t^T``, ``sum_t e^(b_t - c)`` and ``c = max_t b_t`` of each chunk's keys.

    QUERIES: their logarithms less SHIFTS, ``factors_t v_t`` and ``weights_t`` instead of ones.
    """
    program, parts = tl.program_id(0).to(tl.int64), tl.cdiv(D, BD) * tl.cdiv(E, BE)
    part, at = (program % parts).to(tl.int32), program // parts
    chunk, n = (at % chunks).to(tl.int32), at // chunks
    d, e = part // tl.cdiv(E, BE) * BD, part % tl.cdiv(E, BE) * BE
    X += n // heads * xb + n % heads * xh
    V += n // heads * vb + n % heads * vh
    VISIBLE += n // heads * mb + n % heads * mh
    ROWS += n % heads * D * width
    BIAS += n % heads * D
    products, sums = tl.zeros((BD, BE), tl.float32), tl.zeros((BD,), tl.float32)
    largest = tl.full((BD,), FLOOR, tl.float32)
    for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
        x = turned_tokens(X, xt, first, length, width, VISIBLE, HAS_MASK, BT, BW)
        v = tile(V, vt, first, length, e, E, VISIBLE, 0.0, NONE, HAS_MASK, BT, BE)
        z = turned_of_tokens(x, ROWS, BIAS, d, D, width, lower, scale, 0.0, not QUERIES, HAS_BIAS, BD, BW)
        if QUERIES:
            factors = row(FACTORS + n * length, first, length, BT)
            z = tl.where((factors != 0)[None, :], z - row(SHIFTS + n * length, first, length, BT)[None, :], NOTHING)
            v *= factors[:, None]
        else:
            z = tl.where(load_mask(VISIBLE, first, length, HAS_MASK, BT)[None, :], z, NOTHING)
        larger = tl.maximum(largest, tl.max(z, 1))
        features, shrink = round_tf32(tl.exp(z - larger[:, None]), PRECISION), tl.exp(largest - larger)
        if QUERIES:
            sums = sums * shrink + tl.sum(features * row(WEIGHTS + n * length, first, length, BT)[None, :], 1)
            products = whole_product(features, v, products * shrink[:, None], PRECISION)
        else:
            sums = sums * shrink + tl.sum(features, 1)
            products = tl.dot(features, v, products * shrink[:, None], input_precision=PRECISION)
        largest = larger
    STATES += at * (D * E + 2 * D)
    columns, values = d + tl.arange(0, BD), e + tl.arange(0, BE)
    inside = (columns < D)[:, None] & (values < E)[None, :]
    tl.store(STATES + columns[:, None] * E + values[None, :], products, mask=inside)
    tl.store(STATES + D * E + columns, sums, mask=(columns < D) & (e == 0))
    tl.store(STATES + D * E + D + columns, largest, mask=(columns < D) & (e == 0))


@triton.jit
def dropped(products, sums, scales, begins):
    """Sums, or none where a sequence begins."""
    return tl.where(begins, 0.0, products), tl.where(begins, 0.0, sums), tl.where(begins, FLOOR, scales)


@triton.jit
def running_sums(
    STATES, FIRST, LAST, BEGINS, D, E, chunks,
    REVERSED: tl.constexpr, HAS_FIRST: tl.constexpr, PACKED: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Every chunk's sums become those of FIRST and the chunks before it (behind it); LAST: all of them.

    PACKED: of the chunks of its own sequence; ``begins`` says which are a sequence's first.
    """
    blocks, numbers = tl.cdiv(D, BD), D * E + 2 * D
    program = tl.program_id(0).to(tl.int64)
    n, columns = program // blocks, (program % blocks).to(tl.int32) * BD + tl.arange(0, BD)
    some, inside = columns < D, (columns < D)[:, None] & (tl.arange(0, BE) < E)[None, :]
    at = columns[:, None] * E + tl.arange(0, BE)[None, :]
    products, sums, scales = (
        tl.zeros((BD, BE), tl.float32),
        tl.zeros((BD,), tl.float32),
        tl.full((BD,), FLOOR, tl.float32),
    )
    if HAS_FIRST:
        FIRST += n * numbers
        products = tl.load(FIRST + at, mask=inside, other=0.0)
        sums = tl.load(FIRST + D * E + columns, mask=some, other=0.0)
        scales = tl.load(FIRST + D * E + D + columns, mask=some, other=FLOOR)
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSED else step
        state = STATES + (n * chunks + chunk) * numbers
        if PACKED and not REVERSED:
            products, sums, scales = dropped(products, sums, scales, tl.load(BEGINS + chunk) != 0)
        new_products = tl.load(state + at, mask=inside, other=0.0)
        new_sums = tl.load(state + D * E + columns, mask=some, other=0.0)
        new_scales = tl.load(state + D * E + D + columns, mask=some, other=FLOOR)
        tl.store(state + at, products, mask=inside)
        tl.store(state + D * E + columns, sums, mask=some)
        tl.store(state + D * E + D + columns, scales, mask=some)
        larger = tl.maximum(scales, new_scales)
        a, b = tl.exp(scales - larger), tl.exp(new_scales - larger)
        products, sums, scales = products * a[:, None] + new_products * b[:, None], sums * a + new_sums * b, larger
        if PACKED and REVERSED:
            products, sums, scales = dropped(products, sums, scales, tl.load(BEGINS + chunk) != 0)
    LAST += n * numbers
    tl.store(LAST + at, products, mask=inside)
    tl.store(LAST + D * E + columns, sums, mask=some)
    tl.store(LAST + D * E + D + columns, scales, mask=some)
