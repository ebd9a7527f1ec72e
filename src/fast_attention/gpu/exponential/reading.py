"""Kernels that read for queries: the states before their chunk and, where causal, the pairs inside it, over their
largest terms.
"""

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
from fast_attention.gpu.reading import SMALLEST
from fast_attention.gpu.tiles import NONE, load_mask, round_tf32, row, store_tile, tile, whole_product


@triton.jit
def one_by_one(z, b, largest, pairs, numerator, denominator, BT: tl.constexpr):
    """Add the pairs of a block's queries and keys, logarithms z (BT, D) and b (D, BT), each over a query's largest."""
    rows = tl.arange(0, BT)
    for j in range(0, BT):
        terms = tl.where((rows >= j)[:, None], z + column(b, j, BT)[None, :], NOTHING)
        larger = tl.maximum(largest, tl.max(terms, 1))
        shrink = tl.exp(largest - larger)
        added = tl.sum(tl.exp(terms - larger[:, None]), 1)
        pairs = pairs * shrink[:, None] + tl.where((rows == j)[None, :], added[:, None], 0.0)
        numerator, denominator, largest = numerator * shrink[:, None], denominator * shrink, larger
    return largest, pairs, numerator, denominator


@triton.jit
def of_state(
    x, QROWS, BIAS, STATES, e, D, width, E, lower, scale,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Read a state for queries x: the logarithms over which, numerators and denominators."""
    numerator, denominator = tl.zeros((BT, BE), tl.float32), tl.zeros((BT,), tl.float32)
    largest = tl.full((BT,), FLOOR, tl.float32)
    for d in range(0, D, BD):
        z = of_tokens(x, QROWS, BIAS, d, D, width, lower, scale, FLOOR, False, HAS_BIAS, BD, BW)
        z += row(STATES + D * E + D, d, D, BD)[None, :]
        larger = tl.maximum(largest, tl.max(z, 1))
        features, shrink = round_tf32(tl.exp(z - larger[:, None]), PRECISION), tl.exp(largest - larger)
        state = tile(STATES, E, d, D, e, E, STATES, 0.0, NONE, False, BD, BE)
        numerator = whole_product(features, state, numerator * shrink[:, None], PRECISION)
        denominator = denominator * shrink + tl.sum(features * row(STATES + D * E, d, D, BD)[None, :], 1)
        largest = larger
    return largest, numerator, denominator


@triton.jit
def of_block(
    x, y, is_visible, early, is_diagonal, largest, numerator, denominator, QROWS, KROWS, BIAS, D, width, lower, scale,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The weights of queries x for keys y (BW, BT), and sums so far, all over the larger of old and new terms.

    ``is_diagonal``: the keys are those beside the queries; queries that are ``early`` see none of them.
    """
    pairs = tl.zeros((BT, BT), tl.float32)
    for d in range(0, D, BD):
        z = of_tokens(x, QROWS, BIAS, d, D, width, lower, scale, FLOOR, False, HAS_BIAS, BD, BW)
        b = turned_of_tokens(y, KROWS, BIAS, d, D, width, lower, scale, 0.0, True, HAS_BIAS, BD, BW)
        far = exceeds_range(b, is_visible, 1) & is_diagonal
        b = tl.where(is_visible, b, NOTHING)
        if far:
            largest, pairs, numerator, denominator = one_by_one(z, b, largest, pairs, numerator, denominator, BT)
        else:
            top = tl.maximum(tl.max(b, 1), FLOOR)
            z = tl.where(early[:, None], NOTHING, z + top[None, :])
            larger = tl.maximum(largest, tl.max(z, 1))
            shrink = tl.exp(largest - larger)
            pairs = tl.dot(
                tl.exp(z - larger[:, None]), tl.exp(b - top[:, None]), pairs * shrink[:, None],
                input_precision=PRECISION,
            )  # fmt: skip
            numerator, denominator, largest = numerator * shrink[:, None], denominator * shrink, larger
    return largest, pairs, numerator, denominator


@triton.jit
def outputs(
    Q, K, V, QROWS, KROWS, BIAS, VISIBLE, STATES, OUT, REST, FACTORS, SHIFTS,
    heads, length, keys, D, width, E, chunks, lower, scale, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Outputs of a block of queries, what rounding took, one over the denominators, and the logarithms over which."""
    parts, blocks = tl.cdiv(E, BE), tl.cdiv(length, BT)
    program = tl.program_id(0).to(tl.int64)
    e, at = (program % parts).to(tl.int32) * BE, program // parts
    n, first = at // blocks, (at % blocks).to(tl.int32) * BT
    chunk = first // CHUNK if CAUSAL else 0
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, VISIBLE = V + n // heads * vb + n % heads * vh, VISIBLE + n // heads * mb + n % heads * mh
    QROWS, KROWS, BIAS = QROWS + n % heads * D * width, KROWS + n % heads * D * width, BIAS + n % heads * D
    STATES += (n * chunks + chunk) * (D * E + 2 * D)
    x = tokens(Q, qt, first, length, width, Q, False, BT, BW)
    largest, numerator, denominator = of_state(
        x, QROWS, BIAS, STATES, e, D, width, E, lower, scale, HAS_BIAS, PRECISION, BT, BD, BW, BE
    )
    if CAUSAL:
        for other in range(chunk * CHUNK, first + BT, BT):
            y = turned_tokens(K, kt, other, keys, width, VISIBLE, HAS_MASK, BT, BW)
            is_visible = load_mask(VISIBLE, other, keys, HAS_MASK, BT)[None, :]
            early = other + first_seen(VISIBLE, other, keys, HAS_MASK, BT) > first + tl.arange(0, BT)
            largest, pairs, numerator, denominator = of_block(
                x, y, is_visible, early, other == first, largest, numerator, denominator, QROWS, KROWS, BIAS, D, width,
                lower, scale, HAS_BIAS, PRECISION, BT, BD, BW,
            )  # fmt: skip
            pairs = tl.where(other + tl.arange(0, BT)[None, :] > first + tl.arange(0, BT)[:, None], 0.0, pairs)
            pairs = round_tf32(pairs, PRECISION)
            v = tile(V, vt, other, keys, e, E, VISIBLE, 0.0, NONE, HAS_MASK, BT, BE)
            numerator = tl.dot(pairs, v, numerator, input_precision=PRECISION)
            denominator += tl.sum(pairs, 1)
    nothing = denominator < SMALLEST
    factors = tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, denominator))
    out = numerator * factors[:, None]
    store_tile(OUT + n * length * E, E, first, length, e, E, out, BT, BE)
    if KEEP:
        rounded = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        store_tile(REST + n * length * E, E, first, length, e, E, rounded, BT, BE)
    rows = first + tl.arange(0, BT)
    tl.store(FACTORS + n * length + rows, factors, mask=(rows < length) & (e == 0))
    tl.store(SHIFTS + n * length + rows, largest, mask=(rows < length) & (e == 0))
