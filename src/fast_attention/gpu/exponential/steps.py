"""Decoding from exponential features: one token added to a state at its scales and read from it, in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.exponential.tiles import FLOOR, NOTHING
from fast_attention.gpu.steps import quotient, store_state, token
from fast_attention.gpu.tiles import NONE, row, tile


@triton.jit
def logarithms(
    x, ROWS, BIAS, d, D, width, scale, HAS_BIAS: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """Logarithms ``d`` on of one token x (BW), without its norm."""
    z = tl.sum(tile(ROWS, width, d, D, 0, width, ROWS, 0.0, NONE, False, BD, BW) * x[None, :], 1) * scale
    if HAS_BIAS:
        z += row(BIAS, d, D, BD)
    return z


@triton.jit
def exponential(
    Q, K, V, QROWS, KROWS, BIAS, VISIBLE, STATE, OUT, NEXT, heads, D, width, E, scale, qb, qh, kb, kh, vb, vh, mb, mh,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The state with one more key, and what a query reads from it, over its largest term."""
    parts = tl.cdiv(E, BE)
    program = tl.program_id(0).to(tl.int64)
    e, n = (program % parts).to(tl.int32) * BE, program // parts
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, VISIBLE = V + n // heads * vb + n % heads * vh, VISIBLE + n // heads * mb + n % heads * mh
    QROWS, KROWS, BIAS = QROWS + n % heads * D * width, KROWS + n % heads * D * width, BIAS + n % heads * D
    is_visible = tl.load(VISIBLE) != 0 if HAS_MASK else True
    STATE, NEXT = STATE + n * (D * E + 2 * D), NEXT + n * (D * E + 2 * D)
    q, k, v = token(Q, True, 0, width, BW), token(K, is_visible, 0, width, BW), token(V, is_visible, e, E, BE)
    half = 0.5 * scale * scale * tl.sum(k * k, 0)
    numerator, denominator = tl.zeros((BE,), tl.float32), tl.zeros((1,), tl.float32)
    largest = tl.full((1,), FLOOR, tl.float32)
    for d in range(0, D, BD):
        columns = d + tl.arange(0, BD)
        b = tl.where(is_visible, logarithms(k, KROWS, BIAS, d, D, width, scale, HAS_BIAS, BD, BW) - half, NOTHING)
        before = tl.load(STATE + D * E + D + columns, mask=columns < D, other=FLOOR)
        scales = tl.maximum(before, b)
        shrink, added = tl.exp(before - scales), tl.exp(b - scales)
        products = tile(STATE, E, d, D, e, E, STATE, 0.0, NONE, False, BD, BE)
        products = products * shrink[:, None] + added[:, None] * v[None, :]
        sums = row(STATE + D * E, d, D, BD) * shrink + added
        store_state(NEXT, d, D, e, E, products, sums, BD, BE)
        tl.store(NEXT + D * E + D + columns, scales, mask=(columns < D) & (e == 0))
        z = logarithms(q, QROWS, BIAS, d, D, width, scale, HAS_BIAS, BD, BW) + scales
        z = tl.where(columns < D, z, NOTHING)
        larger = tl.maximum(largest, tl.max(z, 0))
        terms, shrink_all = tl.exp(z - larger), tl.exp(largest - larger)
        numerator = numerator * shrink_all + tl.sum(terms[:, None] * products, 0)
        denominator = denominator * shrink_all + tl.sum(terms * sums, 0)
        largest = larger
    values = e + tl.arange(0, BE)
    tl.store(OUT + n * E + values, quotient(numerator, denominator).to(OUT.dtype.element_ty), mask=values < E)
