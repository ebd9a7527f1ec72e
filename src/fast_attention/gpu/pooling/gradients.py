"""Gradients of pools: what queries give, added up from the end, and what keys and values take of it.

With g the gradients, ``w_ij = exp(k_j - l_i)`` the weights, l the logarithms of denominators, which never fall,
``dv_j = sum_{i >= j} w_ij s_i g_i`` and ``dk_j = sum_{i >= j} w_ij (s_i g_i v_j - g_i o_i)``; s are gates, o outputs.
Sums over i are kept over ``exp(-l)`` of the earliest token in them, so that no factor is above one.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.pooling.kernels import FLOOR, key, numbers, position, read_pool, write_pool


@triton.jit
def of_query(Q, OUT, REST, GRAD, t, qt, gt, row, columns, C, GATED: tl.constexpr, HAS_REST: tl.constexpr):
    """``s g``, ``g o`` and the query's own gradient, ``g o (1 - s)``."""
    grad = numbers(GRAD + t * gt, columns, C)
    out = numbers(OUT + row * C, columns, C)
    if HAS_REST:
        out += numbers(REST + row * C, columns, C)
    product = grad * out
    if GATED:
        gate = tl.sigmoid(numbers(Q + t * qt, columns, C))
        return grad * gate, product, product * (1.0 - gate)
    else:
        return grad, product, tl.zeros_like(grad)


@triton.jit
def of_queries(
    Q, OUT, REST, GRAD, LOGS, SUMS, DQ, heads, length, C, size, chunks, qb, qh, qt, gb, gh, gt,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, HAS_REST: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and each chunk's sums, which keys before it take: over ``exp(-l)`` of its first token."""
    columns, chunk, n = position(C, chunks, BC)
    inside = columns < C
    Q, GRAD = Q + n // heads * qb + n % heads * qh, GRAD + n // heads * gb + n % heads * gh
    a, b, scale = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    first, last = chunk * size, tl.minimum(chunk * size + size, length)
    for back in range(0, last - first):
        t = last - 1 - back
        row = n * length + t
        d_numerator, d_denominator, dq = of_query(Q, OUT, REST, GRAD, t, qt, gt, row, columns, C, GATED, HAS_REST)
        if CAUSAL:
            log = numbers(LOGS + row * C, columns, C)
            decay = tl.exp(tl.minimum(log - scale, 0.0))  # of nothing, in the first step
            a, b, scale = a * decay + d_numerator, b * decay + d_denominator, log
        else:
            a, b = a + d_numerator, b + d_denominator
        if GATED:
            tl.store(DQ + row * C + columns, dq.to(DQ.dtype.element_ty), mask=inside)
    write_pool(SUMS + (n * chunks + chunk) * 3 * C, columns, C, scale, a, b)


@triton.jit
def running_sums(SUMS, AFTER, LAST, BEGINS, C, chunks, CAUSAL: tl.constexpr, PACKED: tl.constexpr, BC: tl.constexpr):
    """Every chunk's sums become those of AFTER and the chunks behind it, PACKED of its own sequence; LAST: all."""
    columns, _, n = position(C, 1, BC)
    scale, a, b = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    if CAUSAL:
        scale, a, b = read_pool(AFTER + n * 3 * C, columns, C)
    for back in range(0, chunks):
        where = SUMS + (n * chunks + chunks - 1 - back) * 3 * C
        log, d_numerator, d_denominator = read_pool(where, columns, C)
        write_pool(where, columns, C, scale, a, b)
        decay = tl.exp(log - scale) if CAUSAL else 1.0
        a, b, scale = a * decay + d_numerator, b * decay + d_denominator, log
        if PACKED:  # nothing, over what is larger than all
            begins = tl.load(BEGINS + chunks - 1 - back) != 0
            a, b, scale = tl.where(begins, 0.0, a), tl.where(begins, 0.0, b), tl.where(begins, -FLOOR, scale)
    write_pool(LAST + n * 3 * C, columns, C, scale, a, b)


@triton.jit
def of_keys(
    Q, K, V, VISIBLE, OUT, REST, GRAD, LOGS, SUMS, DK, DV, heads, length, C, size, chunks,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, HAS_REST: tl.constexpr, HAS_MASK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. Not CAUSAL: all of one sum, and nothing of queries is read."""
    columns, chunk, n = position(C, chunks, BC)
    inside = columns < C
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, GRAD = V + n // heads * vb + n % heads * vh, GRAD + n // heads * gb + n % heads * gh
    VISIBLE += n // heads * mb + n % heads * mh
    at = n * chunks + chunk if CAUSAL else n
    scale, a, b = read_pool(SUMS + at * 3 * C, columns, C)
    first, last = chunk * size, tl.minimum(chunk * size + size, length)
    for back in range(0, last - first):
        t = last - 1 - back
        row = n * length + t
        if CAUSAL:
            d_numerator, d_denominator, _ = of_query(Q, OUT, REST, GRAD, t, qt, gt, row, columns, C, GATED, HAS_REST)
            log = numbers(LOGS + row * C, columns, C)
            decay = tl.exp(log - scale)
            a, b, scale = a * decay + d_numerator, b * decay + d_denominator, log
        k, v, shown = key(K, V, kt, vt, t, columns, C, VISIBLE, HAS_MASK)
        weight = tl.exp(tl.where(shown, k - scale, FLOOR))
        tl.store(DK + row * C + columns, (weight * (v * a - b)).to(DK.dtype.element_ty), mask=inside)
        tl.store(DV + row * C + columns, (weight * a).to(DV.dtype.element_ty), mask=inside)
