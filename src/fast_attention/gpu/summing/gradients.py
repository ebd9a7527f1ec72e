"""Gradients of scores that are sums: what queries give, added up from the end, and what keys and values take of it.

With ``d = g / divisor``, outputs o, and s one where the divisor is a sum of scores and else zero: ``dq_i =
d_i (sum v_j - s n o_i)``; over the queries i that see key j, ``dv_j = sum q_i d_i + k_j sum d_i`` and ``dk_j =
v_j sum d_i - s sum d_i o_i``. Outputs are made anew, so that nothing of the forward pass is kept but its arguments.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.pooling.kernels import numbers, position
from fast_attention.gpu.summing import plain as forms
from fast_attention.gpu.summing.kernels import add, divisors, keys, no_keys, read_sums, tile, up_to_each, write_sums

NOTHING, SCORES = tl.constexpr(forms.NOTHING), tl.constexpr(forms.SCORES)


@triton.jit
def of_queries(
    Q, K, V, VISIBLE, SUMS, GRAD, GIVEN, DQ, SHARES, PRODUCTS, heads, length, C, size, chunks,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    CAUSAL: tl.constexpr, DIVISOR: tl.constexpr, HAS_FIRST: tl.constexpr, Q_STEP: tl.constexpr, K_STEP: tl.constexpr,
    HAS_MASK: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and GIVEN: what the queries of each chunk give to the sums that they read.

    CAUSAL, ``d`` and ``-d o`` of every query are stored for ``of_keys``, SHARES and PRODUCTS, where a divisor asks.
    """
    columns, chunk, n = position(C, chunks, BC)
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, VISIBLE = V + n // heads * vb + n % heads * vh, VISIBLE + n // heads * mb + n % heads * mh
    GRAD += n // heads * gb + n % heads * gh
    values, weighted, scores, count = no_keys(BC)
    to_values, to_weighted, to_scores, _ = no_keys(BC)
    if HAS_FIRST:
        before = SUMS + (n * chunks + chunk if CAUSAL else n) * 4 * C
        values, weighted, scores = read_sums(before, columns, C)
        count = numbers(before + 3 * C, columns, C)
    for start in range(chunk * size, tl.minimum(chunk * size + size, length), BT):
        t = start + tl.arange(0, BT)
        inside = (t < length)[:, None] & (columns < C)[None, :]
        q = tile(Q, t, qt, columns, Q_STEP, inside)
        if CAUSAL:
            k, v, shown = keys(K, V, VISIBLE, kt, vt, t, length, columns, C, K_STEP, HAS_MASK)
            s0, s1, b, number = up_to_each(values, weighted, scores, count, k, v, shown)
            values, weighted, scores, count = add(values, weighted, scores, count, k, v, shown)
        else:
            s0, s1, b, number = values[None, :], weighted[None, :], scores[None, :], count[None, :]
        divisor = divisors(q, b, number, DIVISOR)
        share = tile(GRAD, t, gt, columns, 1, inside) / divisor
        where = (n * length + t)[:, None] * C + columns[None, :]
        slope = s0
        if DIVISOR == SCORES:
            out = (q * s0 + s1) / divisor
            slope = s0 - number * out
            to_scores -= tl.sum(share * out, 0)
            if CAUSAL:
                tl.store(PRODUCTS + where, -share * out, mask=inside)
        if CAUSAL and DIVISOR != NOTHING:
            tl.store(SHARES + where, share, mask=inside)
        tl.store(DQ + where, (share * slope).to(DQ.dtype.element_ty), mask=inside)
        to_values, to_weighted = to_values + tl.sum(q * share, 0), to_weighted + tl.sum(share, 0)
    write_sums(GIVEN + (n * chunks + chunk) * 3 * C, columns, C, to_values, to_weighted, to_scores)


@triton.jit
def of_keys(
    Q, K, V, VISIBLE, SHARES, PRODUCTS, GIVEN, DK, DV, heads, length, C, size, chunks,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, sb, sh, st,
    CAUSAL: tl.constexpr, DIVISOR: tl.constexpr, Q_STEP: tl.constexpr, K_STEP: tl.constexpr, HAS_MASK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. Not CAUSAL: all of one row of GIVEN, and nothing of queries is read."""
    columns, chunk, n = position(C, chunks, BC)
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, VISIBLE = V + n // heads * vb + n % heads * vh, VISIBLE + n // heads * mb + n % heads * mh
    SHARES += n // heads * sb + n % heads * sh
    to_values, to_weighted, to_scores = read_sums(GIVEN + (n * chunks + chunk if CAUSAL else n) * 3 * C, columns, C)
    first, last = chunk * size, tl.minimum(chunk * size + size, length)
    for back in range(0, tl.cdiv(last - first, BT)):
        t = first + (tl.cdiv(last - first, BT) - back) * BT - 1 - tl.arange(0, BT)  # from the last token on
        inside = (t < length)[:, None] & (columns < C)[None, :]
        where = (n * length + t)[:, None] * C + columns[None, :]
        k, v, shown = keys(K, V, VISIBLE, kt, vt, t, length, columns, C, K_STEP, HAS_MASK)
        a, d, e = to_values[None, :], to_weighted[None, :], to_scores[None, :]
        if CAUSAL:
            q, share = tile(Q, t, qt, columns, Q_STEP, inside), tile(SHARES, t, st, columns, 1, inside)
            a, d = a + tl.cumsum(q * share, 0), d + tl.cumsum(share, 0)
            to_values, to_weighted = to_values + tl.sum(q * share, 0), to_weighted + tl.sum(share, 0)
            if DIVISOR == SCORES:
                product = tl.load(PRODUCTS + where, mask=inside, other=0.0)
                e, to_scores = e + tl.cumsum(product, 0), to_scores + tl.sum(product, 0)
        dk, dv = tl.where(shown[:, None], v * d + e, 0.0), tl.where(shown[:, None], a + k * d, 0.0)
        tl.store(DK + where, dk.to(DK.dtype.element_ty), mask=inside)
        tl.store(DV + where, dv.to(DV.dtype.element_ty), mask=inside)
