"""Sums over the tokens of every chunk, and of the chunks before or behind each: the states that queries read.

A state is a row of numbers in float32: the products of features and values (D, E), and the sums of features (D) behind.
Exponentials (EXPONENTIAL, SCALED) are taken over their largest term, feature by feature, and the logarithms of what
both are divided by (D) end the row.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.logarithms import NOTHING, turned_of_tokens, turned_tokens
from fast_attention.gpu.tiles import (
    EXPONENTIAL,
    FLOOR,
    NONE,
    load_mask,
    load_sums,
    numbers,
    of_head,
    of_weights,
    place,
    round_tf32,
    row,
    store_state,
    tile,
    turned,
    whole_product,
)


@triton.jit
def chunk_sums(
    X, V, ROWS, BIAS, VISIBLE, DECAYS, FACTORS, WEIGHTS, SHIFTS, STATES, heads, length, D, width, E, chunks, low,
    offset, xb, xh, xt, vb, vh, vt, mb, mh,
    MAP: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``sum_t phi(x_t) v_t^T`` and ``sum_t phi(x_t)`` of each chunk, phi times DECAYS where sums decay.

    Of queries ``factors_t v_t`` and ``weights_t``. EXPONENTIAL, ``phi(x_t)`` is ``e^(b_t - c)`` with ``c = max_t b_t``,
    b the logarithms of keys, or those of queries less SHIFTS.
    """
    program, parts = tl.program_id(0).to(tl.int64), tl.cdiv(D, BD) * tl.cdiv(E, BE)
    part, at = (program % parts).to(tl.int32), program // parts
    chunk, n = (at % chunks).to(tl.int32), at // chunks
    d, e = part // tl.cdiv(E, BE) * BD, part % tl.cdiv(E, BE) * BE
    X, V, VISIBLE = of_head(X, n, heads, xb, xh), of_head(V, n, heads, vb, vh), of_head(VISIBLE, n, heads, mb, mh)
    ROWS, BIAS = of_weights(ROWS, n, heads, D, width), of_weights(BIAS, n, heads, D, 1)
    products, sums = tl.zeros((BD, BE), tl.float32), tl.zeros((BD,), tl.float32)
    largest = tl.full((BD,), FLOOR, tl.float32)
    for first in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
        if MAP == EXPONENTIAL:
            x = turned_tokens(X, xt, first, length, width, VISIBLE, BT, BW)
            v = tile(V, vt, first, length, e, E, VISIBLE, 0.0, NONE, BT, BE)
            z = turned_of_tokens(x, ROWS, BIAS, d, D, width, low, offset, 0.0, FACTORS is None, BD, BW)
            if FACTORS is not None:
                attends = row(FACTORS + n * length, first, length, BT) != 0
                z = tl.where(attends[None, :], z - row(SHIFTS + n * length, first, length, BT)[None, :], NOTHING)
            else:
                z = tl.where(load_mask(VISIBLE, first, length, BT)[None, :], z, NOTHING)
            larger = tl.maximum(largest, tl.max(z, 1))
            features, shrink = tl.exp(z - larger[:, None]), tl.exp(largest - larger)
            products, sums, largest = products * shrink[:, None], sums * shrink, larger
        else:
            features = turned(X, xt, first, length, d, D, VISIBLE, offset, MAP, BT, BD)
            v = tile(V, vt, first, length, e, E, VISIBLE, 0.0, NONE, BT, BE)
            if DECAYS is not None:
                features *= row(DECAYS + n * length, first, length, BT)[None, :]
        features = round_tf32(features, PRECISION)
        if FACTORS is not None:
            v *= row(FACTORS + n * length, first, length, BT)[:, None]
            sums += tl.sum(features * row(WEIGHTS + n * length, first, length, BT)[None, :], 1)
            products = whole_product(features, v, products, PRECISION)
        else:
            sums += tl.sum(features, 1)
            products = tl.dot(features, v, products, input_precision=PRECISION)
    SCALED: tl.constexpr = MAP == EXPONENTIAL
    store_state(STATES + at * numbers(D, E, SCALED), d, D, e, E, products, sums, largest, SCALED, BD, BE)


@triton.jit
def dropped(products, sums, scales, begins):
    """Sums, or none where a sequence begins."""
    return tl.where(begins, 0.0, products), tl.where(begins, 0.0, sums), tl.where(begins, FLOOR, scales)


@triton.jit
def running_sums(
    STATES, FIRST, LAST, TOTALS, BEGINS, D, E, chunks,
    SCALED: tl.constexpr, REVERSED: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Every chunk's sums become those of FIRST and the chunks before it (behind it); LAST: all of them.

    Not SCALED, a state is D numbers of any kind; TOTALS: by what they are multiplied as they pass a chunk. BEGINS:
    which chunks are the first of a packed sequence, for sums of the chunks of its own.
    """
    n, _, d = place(1, D, 1, BD)
    size, columns = numbers(D, E, True) if SCALED else D, d + tl.arange(0, BD)
    at = columns[:, None] * E + tl.arange(0, BE)[None, :]
    inside = (columns < D)[:, None] & (tl.arange(0, BE) < E)[None, :]
    products, sums = tl.zeros((BD, BE), tl.float32), tl.zeros((BD,), tl.float32)
    scales = tl.full((BD,), FLOOR, tl.float32)
    if FIRST is not None:
        if SCALED:
            products = tl.load(FIRST + n * size + at, mask=inside, other=0.0)
            sums, scales = load_sums(FIRST + n * size, d, D, E, True, BD)
        else:
            sums = row(FIRST + n * size, d, D, BD)
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSED else step
        state = STATES + (n * chunks + chunk) * size
        if SCALED:
            if BEGINS is not None and not REVERSED:
                products, sums, scales = dropped(products, sums, scales, tl.load(BEGINS + chunk) != 0)
            new_products = tl.load(state + at, mask=inside, other=0.0)
            new_sums, new_scales = load_sums(state, d, D, E, True, BD)
            tl.store(state + at, products, mask=inside)
            tl.store(state + D * E + columns, sums, mask=columns < D)
            tl.store(state + D * E + D + columns, scales, mask=columns < D)
            larger = tl.maximum(scales, new_scales)
            a, b = tl.exp(scales - larger), tl.exp(new_scales - larger)
            products, sums, scales = products * a[:, None] + new_products * b[:, None], sums * a + new_sums * b, larger
            if BEGINS is not None and REVERSED:
                products, sums, scales = dropped(products, sums, scales, tl.load(BEGINS + chunk) != 0)
        else:
            new_sums = row(state, d, D, BD)
            tl.store(state + columns, sums, mask=columns < D)
            if TOTALS is not None:
                sums *= tl.load(TOTALS + n * chunks + chunk)
            sums += new_sums
    if SCALED:
        store_state(LAST + n * size, d, D, 0, E, products, sums, scales, True, BD, BE)
    else:
        tl.store(LAST + n * size + columns, sums, mask=columns < D)


@triton.jit
def row_products(
    OUT, REST, GRAD, FACTORS, WEIGHTS, heads, length, E, gb, gh, gt, BT: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """``-factors_t (grad_t . out_t)``, the gradients of the denominators: of outputs before they were rounded."""
    n, first, _ = place(length, 1, BT, 1)
    GRAD = of_head(GRAD, n, heads, gb, gh)
    total = tl.zeros((BT,), tl.float32)
    for e in range(0, E, BE):
        g = tile(GRAD, gt, first, length, e, E, None, 0.0, NONE, BT, BE)
        out = tile(OUT + n * length * E, E, first, length, e, E, None, 0.0, NONE, BT, BE)
        if REST is not None:
            out += tile(REST + n * length * E, E, first, length, e, E, None, 0.0, NONE, BT, BE)
        total += tl.sum(g * out, 1)
    rows = first + tl.arange(0, BT)
    factors = row(FACTORS + n * length, first, length, BT)
    tl.store(WEIGHTS + n * length + rows, -factors * total, mask=rows < length)
