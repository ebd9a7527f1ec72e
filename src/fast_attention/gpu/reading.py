"""Kernels that read for queries: the states before their chunk and, where causal, the pairs inside it.

Of exponentials all that a query reads is taken over its largest term.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.decays import between
from fast_attention.gpu.logarithms import (
    NOTHING,
    column,
    exceeds_range,
    first_seen,
    of_tokens,
    tokens,
    turned_of_tokens,
    turned_tokens,
)
from fast_attention.gpu.tiles import (
    EXPONENTIAL,
    FLOOR,
    NONE,
    SMALLEST,
    load_mask,
    numbers,
    of_head,
    of_weights,
    place,
    round_tf32,
    row,
    store_tile,
    tile,
    turned,
    whole_product,
)


@triton.jit
def scores(
    Q, qt, first, length, K, kt, other, keys, D, VISIBLE, offset,
    MAP: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """``phi(q_i) . phi(k_j)`` of a block of queries and one of keys."""
    pairs = tl.zeros((BT, BT), tl.float32)
    for d in range(0, D, BD):
        q = tile(Q, qt, first, length, d, D, None, offset, MAP, BT, BD)
        k = turned(K, kt, other, keys, d, D, VISIBLE, offset, MAP, BT, BD)
        pairs = tl.dot(q, k, pairs, input_precision=PRECISION)
    return pairs


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
def of_block(
    x, y, is_visible, early, is_diagonal, largest, numerator, denominator, QROWS, KROWS, BIAS, D, width, lower, scale,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """The weights of queries x for keys y (BW, BT), and sums so far, all over the larger of old and new terms.

    ``is_diagonal``: the keys are those beside the queries; queries that are ``early`` see none of them.
    """
    pairs = tl.zeros((BT, BT), tl.float32)
    for d in range(0, D, BD):
        z = of_tokens(x, QROWS, BIAS, d, D, width, lower, scale, FLOOR, False, BD, BW)
        b = turned_of_tokens(y, KROWS, BIAS, d, D, width, lower, scale, 0.0, True, BD, BW)
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
    Q, K, V, QROWS, KROWS, BIAS, VISIBLE, SINCE, LOGS, STATES, OUT, REST, FACTORS, SHIFTS,
    heads, length, keys, D, width, E, chunks, low, offset, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, eps,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``phi(q_i) . S / (phi(q_i) . z + eps)`` of a block of queries, what rounding took, one over the denominators.

    LOGS: pairs and states fade from token to token (``gpu/decays.py``); not NORMALIZED: the numerators. SHIFTS: the
    logarithms over which sums of exponentials are.
    """
    n, first, e = place(length, E, BT, BE)
    chunk, rows = first // CHUNK if CAUSAL else 0, first + tl.arange(0, BT)
    Q, K, V = of_head(Q, n, heads, qb, qh), of_head(K, n, heads, kb, kh), of_head(V, n, heads, vb, vh)
    VISIBLE, BIAS = of_head(VISIBLE, n, heads, mb, mh), of_weights(BIAS, n, heads, D, 1)
    QROWS, KROWS = of_weights(QROWS, n, heads, D, width), of_weights(KROWS, n, heads, D, width)
    STATES += (n * chunks + chunk) * numbers(D, E, MAP == EXPONENTIAL)
    numerator, denominator = tl.zeros((BT, BE), tl.float32), tl.zeros((BT,), tl.float32)
    largest = tl.full((BT,), FLOOR, tl.float32)
    if MAP == EXPONENTIAL:
        x = tokens(Q, qt, first, length, width, None, BT, BW)
    for d in range(0, D, BD):
        if MAP == EXPONENTIAL:
            z = of_tokens(x, QROWS, BIAS, d, D, width, low, offset, FLOOR, False, BD, BW)
            z += row(STATES + D * E + D, d, D, BD)[None, :]
            larger = tl.maximum(largest, tl.max(z, 1))
            features, shrink = tl.exp(z - larger[:, None]), tl.exp(largest - larger)
            numerator, denominator, largest = numerator * shrink[:, None], denominator * shrink, larger
        else:
            features = tile(Q, qt, first, length, d, D, None, offset, MAP, BT, BD)
        features = round_tf32(features, PRECISION)
        state = tile(STATES, E, d, D, e, E, None, 0.0, NONE, BD, BE)
        numerator = whole_product(features, state, numerator, PRECISION)
        denominator += tl.sum(features * row(STATES + D * E, d, D, BD)[None, :], 1)
    if LOGS is not None:
        since = row(SINCE + n * length, first, length, BT)
        numerator, denominator = numerator * since[:, None], denominator * since
    if CAUSAL:
        for other in range(chunk * CHUNK, first + BT, BT):
            if MAP == EXPONENTIAL:
                y = turned_tokens(K, kt, other, keys, width, VISIBLE, BT, BW)
                is_visible = load_mask(VISIBLE, other, keys, BT)[None, :]
                early = other + first_seen(VISIBLE, other, keys, BT) > rows
                largest, pairs, numerator, denominator = of_block(
                    x, y, is_visible, early, other == first, largest, numerator, denominator, QROWS, KROWS, BIAS, D,
                    width, low, offset, PRECISION, BT, BD, BW,
                )  # fmt: skip
            else:
                pairs = scores(Q, qt, first, length, K, kt, other, keys, D, VISIBLE, offset, MAP, PRECISION, BT, BD)
            pairs = tl.where(other + tl.arange(0, BT)[None, :] > rows[:, None], 0.0, pairs)
            if LOGS is not None:
                pairs *= between(LOGS + n * length, low, first, other, length, BT)
            pairs = round_tf32(pairs, PRECISION)
            v = tile(V, vt, other, keys, e, E, VISIBLE, 0.0, NONE, BT, BE)
            numerator = tl.dot(pairs, v, numerator, input_precision=PRECISION)
            denominator += tl.sum(pairs, 1)
    denominator = denominator + eps if NORMALIZED else tl.full((BT,), 1.0, tl.float32)
    nothing = tl.abs(denominator) < SMALLEST
    factors = tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, denominator))
    out, writes = numerator * factors[:, None], (rows < length) & (e == 0)
    store_tile(OUT + n * length * E, E, first, length, e, E, out, BT, BE)
    if REST is not None:
        rest = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        store_tile(REST + n * length * E, E, first, length, e, E, rest, BT, BE)
    tl.store(FACTORS + n * length + rows, factors, mask=writes)
    if SHIFTS is not None:
        tl.store(SHIFTS + n * length + rows, largest, mask=writes)
