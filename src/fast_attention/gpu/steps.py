"""Decoding: one token added to a state and read from it, in one kernel and float32 throughout."""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.logarithms import NOTHING
from fast_attention.gpu.tiles import (
    EXPONENTIAL,
    FLOOR,
    NONE,
    SMALLEST,
    feature,
    load_sums,
    numbers,
    of_head,
    of_weights,
    place,
    row,
    store_state,
    tile,
)


@triton.jit
def token(X, at, column, width, COLUMNS: tl.constexpr):
    """Columns ``column`` on of one token, (COLUMNS); ``at``: whether it may be read."""
    columns = column + tl.arange(0, COLUMNS)
    return tl.load(X + columns, mask=(columns < width) & at, other=0.0).to(tl.float32)


@triton.jit
def logarithms(x, ROWS, BIAS, d, D, width, scale, BD: tl.constexpr, BW: tl.constexpr):
    """Logarithms ``d`` on of one token x (BW), without its norm."""
    z = tl.sum(tile(ROWS, width, d, D, 0, width, None, 0.0, NONE, BD, BW) * x[None, :], 1) * scale
    if BIAS is not None:
        z += row(BIAS, d, D, BD)
    return z


@triton.jit
def step(
    Q, K, V, QROWS, KROWS, BIAS, VISIBLE, DECAYS, STATE, OUT, NEXT, heads, D, width, E, offset, eps,
    qb, qh, kb, kh, vb, vh, mb, mh,
    MAP: tl.constexpr, NORMALIZED: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``S' = S + phi(k) v^T``, ``z' = z + phi(k)`` and ``phi(q) S' / (phi(q) . z' + eps)``; DECAYS: S and z fade.

    Of exponentials sums are over the largest terms of their features, and what is read over its own largest.
    """
    n, _, e = place(1, E, 1, BE)
    SCALED: tl.constexpr = MAP == EXPONENTIAL
    Q, K, V = of_head(Q, n, heads, qb, qh), of_head(K, n, heads, kb, kh), of_head(V, n, heads, vb, vh)
    QROWS, KROWS = of_weights(QROWS, n, heads, D, width), of_weights(KROWS, n, heads, D, width)
    VISIBLE, BIAS = of_head(VISIBLE, n, heads, mb, mh), of_weights(BIAS, n, heads, D, 1)
    is_visible = tl.load(VISIBLE) != 0 if VISIBLE is not None else True
    STATE, NEXT = STATE + n * numbers(D, E, SCALED), NEXT + n * numbers(D, E, SCALED)
    v, numerator = token(V, is_visible, e, E, BE), tl.zeros((BE,), tl.float32)
    denominator, largest = tl.zeros((1,), tl.float32), tl.full((1,), FLOOR, tl.float32)
    decay = tl.load(DECAYS + n) if DECAYS is not None else 1.0
    if MAP == EXPONENTIAL:
        q, k = token(Q, True, 0, width, BW), token(K, is_visible, 0, width, BW)
        half = 0.5 * offset * offset * tl.sum(k * k, 0)
    for d in range(0, D, BD):
        exists = d + tl.arange(0, BD) < D
        products = tile(STATE, E, d, D, e, E, None, 0.0, NONE, BD, BE)
        sums, scales = load_sums(STATE, d, D, E, SCALED, BD)
        if MAP == EXPONENTIAL:
            b = tl.where(is_visible, logarithms(k, KROWS, BIAS, d, D, width, offset, BD, BW) - half, NOTHING)
            before, scales = scales, tl.maximum(scales, b)
            shrink, added = tl.exp(before - scales), tl.exp(b - scales)
            products, sums = products * shrink[:, None], sums * shrink
            z = logarithms(q, QROWS, BIAS, d, D, width, offset, BD, BW) + scales
            z = tl.where(exists, z, NOTHING)
            larger = tl.maximum(largest, tl.max(z, 0))
            features, shrink_all = tl.exp(z - larger), tl.exp(largest - larger)
            numerator, denominator, largest = numerator * shrink_all, denominator * shrink_all, larger
        else:
            features = tl.where(exists, feature(token(Q, True, d, D, BD), offset, MAP), 0.0)
            added = tl.where(exists & is_visible, feature(token(K, is_visible, d, D, BD), offset, MAP), 0.0)
            products, sums = products * decay, sums * decay
        products, sums = products + added[:, None] * v[None, :], sums + added
        store_state(NEXT, d, D, e, E, products, sums, scales, SCALED, BD, BE)
        numerator += tl.sum(features[:, None] * products, 0)
        denominator += tl.sum(features * sums, 0)
    if NORMALIZED:
        denominator += eps
        nothing = tl.abs(denominator) < SMALLEST
        numerator = tl.where(nothing, 0.0, numerator / tl.where(nothing, 1.0, denominator))
    values = e + tl.arange(0, BE)
    tl.store(OUT + n * E + values, numerator.to(OUT.dtype.element_ty), mask=values < E)
