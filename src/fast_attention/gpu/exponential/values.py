"""Gradients of values, as those of queries and keys: see ``gradients``."""

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.exponential.tiles import (
    FLOOR,
    NOTHING,
    column,
    exceeds_range,
    first_seen,
    of_tokens,
    tokens,
    turned_of_tokens,
    turned_tokens,
)
from fast_attention.gpu.tiles import NONE, load_mask, row, store_tile, tile


@triton.jit
def add_pairs(pairs, b, g, far, PRECISION: tl.constexpr, BT: tl.constexpr):
    """Add the weights of a block of keys for one of queries, logarithms b (BT, D) and g (D, BT), (keys, queries)."""
    if far:
        rows = tl.arange(0, BT)
        for i in range(0, BT):
            terms = tl.where((rows <= i)[:, None], b + column(g, i, BT)[None, :], NOTHING)
            pairs += tl.where((rows == i)[None, :], tl.sum(tl.exp(terms), 1)[:, None], 0.0)
    else:
        top = tl.maximum(tl.max(g, 1), FLOOR)
        pairs = tl.dot(tl.exp(b + top[None, :]), tl.exp(g - top[:, None]), pairs, input_precision=PRECISION)
    return pairs


@triton.jit
def of_values(
    Q, K, QROWS, KROWS, BIAS, VISIBLE, GRAD, FACTORS, SHIFTS, STATES, OUT,
    heads, length, keys, D, width, E, chunks, lower, scale, qb, qh, qt, kb, kh, kt, mb, mh, gb, gh, gt,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of values: what keys give, and the pairs inside the chunk."""
    parts, blocks = tl.cdiv(E, BE), tl.cdiv(keys, BT)
    program = tl.program_id(0).to(tl.int64)
    e, at = (program % parts).to(tl.int32) * BE, program // parts
    n, first = at // blocks, (at % blocks).to(tl.int32) * BT
    chunk = first // CHUNK if CAUSAL else 0
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    GRAD, VISIBLE = GRAD + n // heads * gb + n % heads * gh, VISIBLE + n // heads * mb + n % heads * mh
    QROWS, KROWS, BIAS = QROWS + n % heads * D * width, KROWS + n % heads * D * width, BIAS + n % heads * D
    STATES += (n * chunks + chunk) * (D * E + 2 * D)
    x = tokens(K, kt, first, keys, width, VISIBLE, HAS_MASK, BT, BW)
    is_visible = load_mask(VISIBLE, first, keys, HAS_MASK, BT)[:, None]
    total, rows = tl.zeros((BT, BE), tl.float32), tl.arange(0, BT)
    for d in range(0, D, BD):
        b = of_tokens(x, KROWS, BIAS, d, D, width, lower, scale, 0.0, True, HAS_BIAS, BD, BW)
        b = tl.where(is_visible, b + row(STATES + D * E + D, d, D, BD)[None, :], NOTHING)
        state = tile(STATES, E, d, D, e, E, Q, 0.0, NONE, False, BD, BE)
        total = tl.dot(tl.exp(b), state, total, input_precision=PRECISION)
    if CAUSAL:
        for other in range(first, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
            pairs = tl.zeros((BT, BT), tl.float32)
            factors = row(FACTORS + n * length, other, length, BT)
            y = turned_tokens(Q, qt, other, length, width, Q, False, BT, BW)
            attends = (factors != 0) & (other + rows >= first + first_seen(VISIBLE, first, keys, HAS_MASK, BT))
            for d in range(0, D, BD):
                b = of_tokens(x, KROWS, BIAS, d, D, width, lower, scale, 0.0, True, HAS_BIAS, BD, BW)
                far = exceeds_range(b, is_visible, 0) & (other == first)
                b = tl.where(is_visible, b, NOTHING)
                g = turned_of_tokens(y, QROWS, BIAS, d, D, width, lower, scale, FLOOR, False, HAS_BIAS, BD, BW)
                g -= row(SHIFTS + n * length, other, length, BT)[None, :]
                pairs = add_pairs(pairs, b, tl.where(attends[None, :], g, NOTHING), far, PRECISION, BT)
            pairs = tl.where(other + rows[None, :] < first + rows[:, None], 0.0, pairs)
            grad = tile(GRAD, gt, other, length, e, E, GRAD, 0.0, NONE, False, BT, BE) * factors[:, None]
            total = tl.dot(pairs, grad, total, input_precision=PRECISION)
    store_tile(OUT + n * keys * E, E, first, keys, e, E, total, BT, BE)
