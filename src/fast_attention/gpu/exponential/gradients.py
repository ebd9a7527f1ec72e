"""Gradients of queries and keys, each block by its own program: no two write to one place.

Pairs' weights are ``e^(b_j + g_i)``, g a query's logarithms over its denominator's. States are what queries read, and
what keys give: sums over queries behind the chunk, each feature over the largest of its ``e^g``.
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
    line,
    of_tokens,
    rows_of,
    tokens,
)
from fast_attention.gpu.tiles import NONE, load_mask, row, store_tile, tile, turned, whole_product


@triton.jit
def query_pairs(
    GRAD, gt, first, length, factors, weights, V, vt, other, keys, VISIBLE, E,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights of a block of queries for one of keys, (queries, keys); zeros where these come later."""
    pairs = tl.zeros((BT, BT), tl.float32)
    for e in range(0, E, BE):
        grad = tile(GRAD, gt, first, length, e, E, GRAD, 0.0, NONE, False, BT, BE)
        v = turned(V, vt, other, keys, e, E, VISIBLE, 0.0, NONE, HAS_MASK, BT, BE)
        pairs = tl.dot(grad, v, pairs, input_precision=PRECISION)
    later = other + tl.arange(0, BT)[None, :] > first + tl.arange(0, BT)[:, None]
    return tl.where(later, 0.0, pairs * factors + weights)


@triton.jit
def key_pairs(
    GRAD, gt, other, length, factors, weights, V, vt, first, keys, VISIBLE, E,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The gradients of pairs as (keys, queries), for a block of keys and one of queries; zeros where these come
    earlier.
    """
    pairs = tl.zeros((BT, BT), tl.float32)
    for e in range(0, E, BE):
        v = tile(V, vt, first, keys, e, E, VISIBLE, 0.0, NONE, HAS_MASK, BT, BE)
        grad = turned(GRAD, gt, other, length, e, E, GRAD, 0.0, NONE, False, BT, BE)
        pairs = tl.dot(v, grad, pairs, input_precision=PRECISION)
    earlier = other + tl.arange(0, BT)[None, :] < first + tl.arange(0, BT)[:, None]
    return tl.where(earlier, 0.0, pairs * factors + weights)


@triton.jit
def through_state(
    X, xt, first, length, VISIBLE, STATES, d, D, E,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Products of gradients, or of values, with a state."""
    total = tl.zeros((BT, BD), tl.float32)
    for e in range(0, E, BE):
        x = tile(X, xt, first, length, e, E, VISIBLE, 0.0, NONE, HAS_MASK, BT, BE)
        total = whole_product(x, turned(STATES, E, d, D, e, E, STATES, 0.0, NONE, False, BD, BE), total, PRECISION)
    return total


@triton.jit
def through_keys(z, b, pairs, early, far, PRECISION: tl.constexpr, BT: tl.constexpr):
    """The gradients of queries' logarithms z that a block of keys with logarithms b gives."""
    if far:
        rows, dz = tl.arange(0, BT), tl.zeros(z.shape, tl.float32)
        for j in range(0, BT):
            terms = tl.where((rows >= j)[:, None], z + line(b, j, BT)[None, :], NOTHING)
            dz += column(pairs, j, BT)[:, None] * tl.exp(terms)
    else:
        top = tl.maximum(tl.max(b, 0), FLOOR)[None, :]
        read = tl.dot(pairs, tl.exp(b - top), input_precision=PRECISION)
        dz = tl.exp(tl.where(early[:, None], NOTHING, z + top)) * read
    return dz


@triton.jit
def through_queries(b, g, pairs, far, PRECISION: tl.constexpr, BT: tl.constexpr):
    """The gradients of keys' logarithms b that a block of queries with logarithms g gives."""
    if far:
        rows, db = tl.arange(0, BT), tl.zeros(b.shape, tl.float32)
        for i in range(0, BT):
            terms = tl.where((rows <= i)[:, None], b + line(g, i, BT)[None, :], NOTHING)
            db += column(pairs, i, BT)[:, None] * tl.exp(terms)
    else:
        top = tl.maximum(tl.max(g, 0), FLOOR)[None, :]
        db = tl.exp(b + top) * tl.dot(pairs, tl.exp(g - top), input_precision=PRECISION)
    return db


@triton.jit
def of_queries(
    Q, K, V, QROWS, KROWS, BIAS, VISIBLE, GRAD, FACTORS, SHIFTS, WEIGHTS, STATES, OUT, LOGS,
    heads, length, keys, D, width, E, chunks, lower, scale, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, TRAINED: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries, TRAINED: and those of their logarithms, of which the rows' gradient is made."""
    blocks = tl.cdiv(length, BT)
    program = tl.program_id(0).to(tl.int64)
    n, first = program // blocks, (program % blocks).to(tl.int32) * BT
    chunk = first // CHUNK if CAUSAL else 0
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, GRAD = V + n // heads * vb + n % heads * vh, GRAD + n // heads * gb + n % heads * gh
    QROWS, KROWS, BIAS = QROWS + n % heads * D * width, KROWS + n % heads * D * width, BIAS + n % heads * D
    VISIBLE += n // heads * mb + n % heads * mh
    STATES += (n * chunks + chunk) * (D * E + 2 * D)
    x = tokens(Q, qt, first, length, width, Q, False, BT, BW)
    factors = row(FACTORS + n * length, first, length, BT)[:, None]
    shifts = row(SHIFTS + n * length, first, length, BT)[:, None]
    weights = row(WEIGHTS + n * length, first, length, BT)[:, None]
    dx, rows = tl.zeros((BT, BW), tl.float32), tl.arange(0, BT)
    for d in range(0, D, BD):
        z = of_tokens(x, QROWS, BIAS, d, D, width, lower, scale, FLOOR, False, HAS_BIAS, BD, BW) - shifts
        z = tl.where(factors != 0, z, FLOOR)
        dz = through_state(GRAD, gt, first, length, Q, STATES, d, D, E, False, PRECISION, BT, BD, BE) * factors
        dz += weights * row(STATES + D * E, d, D, BD)[None, :]
        dz *= tl.exp(z + row(STATES + D * E + D, d, D, BD)[None, :])
        if CAUSAL:
            for other in range(chunk * CHUNK, first + BT, BT):
                pairs = query_pairs(
                    GRAD, gt, first, length, factors, weights, V, vt, other, keys, VISIBLE, E, HAS_MASK, PRECISION,
                    BT, BE,
                )  # fmt: skip
                y = tokens(K, kt, other, keys, width, VISIBLE, HAS_MASK, BT, BW)
                is_visible = load_mask(VISIBLE, other, keys, HAS_MASK, BT)[:, None]
                early = other + first_seen(VISIBLE, other, keys, HAS_MASK, BT) > first + rows
                b = of_tokens(y, KROWS, BIAS, d, D, width, lower, scale, 0.0, True, HAS_BIAS, BD, BW)
                far = exceeds_range(b, is_visible, 0) & (other == first)
                dz += through_keys(z, tl.where(is_visible, b, NOTHING), pairs, early, far, PRECISION, BT)
        dx = tl.dot(dz, rows_of(QROWS, d, D, width, lower, BD, BW), dx, input_precision=PRECISION)
        if TRAINED:
            store_tile(LOGS + n * length * D, D, first, length, d, D, dz, BT, BD)
    store_tile(OUT + n * length * width, width, first, length, 0, width, dx * scale, BT, BW)


@triton.jit
def of_keys(
    Q, K, V, QROWS, KROWS, BIAS, VISIBLE, GRAD, FACTORS, SHIFTS, WEIGHTS, STATES, OUT, LOGS,
    heads, length, keys, D, width, E, chunks, lower, scale, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, TRAINED: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys, TRAINED: and those of their logarithms."""
    blocks = tl.cdiv(keys, BT)
    program = tl.program_id(0).to(tl.int64)
    n, first = program // blocks, (program % blocks).to(tl.int32) * BT
    chunk = first // CHUNK if CAUSAL else 0
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, GRAD = V + n // heads * vb + n % heads * vh, GRAD + n // heads * gb + n % heads * gh
    QROWS, KROWS, BIAS = QROWS + n % heads * D * width, KROWS + n % heads * D * width, BIAS + n % heads * D
    VISIBLE += n // heads * mb + n % heads * mh
    STATES += (n * chunks + chunk) * (D * E + 2 * D)
    x = tokens(K, kt, first, keys, width, VISIBLE, HAS_MASK, BT, BW)
    is_visible = load_mask(VISIBLE, first, keys, HAS_MASK, BT)[:, None]
    dx, squares, rows = tl.zeros((BT, BW), tl.float32), tl.zeros((BT,), tl.float32), tl.arange(0, BT)
    for d in range(0, D, BD):
        b = of_tokens(x, KROWS, BIAS, d, D, width, lower, scale, 0.0, True, HAS_BIAS, BD, BW)
        far = exceeds_range(b, is_visible, 0)
        b = tl.where(is_visible, b, NOTHING)
        db = through_state(V, vt, first, keys, VISIBLE, STATES, d, D, E, HAS_MASK, PRECISION, BT, BD, BE)
        db += row(STATES + D * E, d, D, BD)[None, :]
        db *= tl.exp(b + row(STATES + D * E + D, d, D, BD)[None, :])
        if CAUSAL:
            for other in range(first, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
                factors = row(FACTORS + n * length, other, length, BT)
                weights = row(WEIGHTS + n * length, other, length, BT)[None, :]
                pairs = key_pairs(
                    GRAD, gt, other, length, factors[None, :], weights, V, vt, first, keys, VISIBLE, E, HAS_MASK,
                    PRECISION, BT, BE,
                )  # fmt: skip
                y = tokens(Q, qt, other, length, width, Q, False, BT, BW)
                g = of_tokens(y, QROWS, BIAS, d, D, width, lower, scale, FLOOR, False, HAS_BIAS, BD, BW)
                g -= row(SHIFTS + n * length, other, length, BT)[:, None]
                attends = (factors != 0) & (other + rows >= first + first_seen(VISIBLE, first, keys, HAS_MASK, BT))
                g = tl.where(attends[:, None], g, NOTHING)
                db += through_queries(b, g, pairs, far & (other == first), PRECISION, BT)
        db = tl.where((d + tl.arange(0, BD) < D)[None, :], db, 0.0)
        dx = tl.dot(db, rows_of(KROWS, d, D, width, lower, BD, BW), dx, input_precision=PRECISION)
        squares += tl.sum(db, 1)
        if TRAINED:
            store_tile(LOGS + n * keys * D, D, first, keys, d, D, db, BT, BD)
    dx = (dx - x.to(tl.float32) * (squares * scale)[:, None]) * scale
    store_tile(OUT + n * keys * width, width, first, keys, 0, width, dx, BT, BW)
