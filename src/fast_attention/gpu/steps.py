"""Decoding: one token added to a state and read from it, in one kernel and float32 throughout."""

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.reading import SMALLEST
from fast_attention.gpu.tiles import NONE, feature, row, tile


@triton.jit
def quotient(numerator, denominator):
    """Zeros where the denominator is none."""
    nothing = tl.abs(denominator) < SMALLEST
    return tl.where(nothing, 0.0, numerator / tl.where(nothing, 1.0, denominator))


@triton.jit
def token(X, at, column, width, COLUMNS: tl.constexpr):
    """Columns ``column`` on of one token, (COLUMNS); ``at``: whether it may be read."""
    columns = column + tl.arange(0, COLUMNS)
    return tl.load(X + columns, mask=(columns < width) & at, other=0.0).to(tl.float32)


@triton.jit
def store_state(STATE, d, D, e, E, products, sums, BD: tl.constexpr, BE: tl.constexpr):
    """Write a tile of products, and beside the first of a row the sums of features."""
    columns, values = d + tl.arange(0, BD), e + tl.arange(0, BE)
    inside = (columns < D)[:, None] & (values < E)[None, :]
    tl.store(STATE + columns[:, None] * E + values[None, :], products, mask=inside)
    tl.store(STATE + D * E + columns, sums, mask=(columns < D) & (e == 0))


@triton.jit
def elementwise(
    Q, K, V, VISIBLE, STATE, DECAYS, OUT, NEXT, heads, D, E, eps, offset, qb, qh, kb, kh, vb, vh, mb, mh,
    MAP: tl.constexpr, DECAYED: tl.constexpr, NORMALIZED: tl.constexpr, HAS_MASK: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``S' = S + phi(k) v^T``, ``z' = z + phi(k)`` and ``phi(q) S' / (phi(q) . z' + eps)``; DECAYED: S and z fade."""
    parts = tl.cdiv(E, BE)
    program = tl.program_id(0).to(tl.int64)
    e, n = (program % parts).to(tl.int32) * BE, program // parts
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, VISIBLE = V + n // heads * vb + n % heads * vh, VISIBLE + n // heads * mb + n % heads * mh
    is_visible = tl.load(VISIBLE) != 0 if HAS_MASK else True
    STATE, NEXT = STATE + n * (D * E + D), NEXT + n * (D * E + D)
    v, numerator = token(V, is_visible, e, E, BE), tl.zeros((BE,), tl.float32)
    denominator = tl.zeros((1,), tl.float32)
    decay = tl.load(DECAYS + n) if DECAYED else 1.0
    for d in range(0, D, BD):
        exists = d + tl.arange(0, BD) < D
        q = tl.where(exists, feature(token(Q, True, d, D, BD), offset, MAP), 0.0)
        k = tl.where(exists & is_visible, feature(token(K, is_visible, d, D, BD), offset, MAP), 0.0)
        products = tile(STATE, E, d, D, e, E, Q, 0.0, NONE, False, BD, BE) * decay + k[:, None] * v[None, :]
        sums = row(STATE + D * E, d, D, BD) * decay + k
        store_state(NEXT, d, D, e, E, products, sums, BD, BE)
        numerator += tl.sum(q[:, None] * products, 0)
        denominator += tl.sum(q * sums, 0)
    values = e + tl.arange(0, BE)
    out = quotient(numerator, denominator + eps) if NORMALIZED else numerator
    tl.store(OUT + n * E + values, out.to(OUT.dtype.element_ty), mask=values < E)
