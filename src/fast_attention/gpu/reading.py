"""Kernels that read for queries: the states before their chunk and, where causal, the pairs inside it."""

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu import maps
from fast_attention.gpu.decays import between
from fast_attention.gpu.tiles import NONE, round_tf32, row, store_tile, tile, turned, whole_product

SMALLEST = tl.constexpr(maps.SMALLEST)


@triton.jit
def scores(
    Q, qt, first, length, K, kt, other, keys, D, VISIBLE, offset,
    MAP: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """``phi(q_i) . phi(k_j)`` of a block of queries and one of keys, zeros where key j comes after query i."""
    pairs = tl.zeros((BT, BT), tl.float32)
    for d in range(0, D, BD):
        q = tile(Q, qt, first, length, d, D, Q, offset, MAP, False, BT, BD)
        k = turned(K, kt, other, keys, d, D, VISIBLE, offset, MAP, HAS_MASK, BT, BD)
        pairs = tl.dot(q, k, pairs, input_precision=PRECISION)
    later = other + tl.arange(0, BT)[None, :] > first + tl.arange(0, BT)[:, None]
    return tl.where(later, 0.0, pairs)


@triton.jit
def outputs(
    Q, K, V, VISIBLE, STATES, SINCE, LOGS, OUT, REST, FACTORS, heads, length, keys, D, E, chunks, low, eps, offset,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, DECAYED: tl.constexpr, NORMALIZED: tl.constexpr,
    HAS_MASK: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``phi(q_i) . S / (phi(q_i) . z + eps)`` of a block of queries, what rounding took, one over the denominators.

    DECAYED: pairs and states fade from token to token (``gpu/decays.py``); not NORMALIZED: the numerators.
    """
    parts, blocks = tl.cdiv(E, BE), tl.cdiv(length, BT)
    program = tl.program_id(0).to(tl.int64)
    e, at = (program % parts).to(tl.int32) * BE, program // parts
    n, first = at // blocks, (at % blocks).to(tl.int32) * BT
    chunk = first // CHUNK if CAUSAL else 0
    Q += n // heads * qb + n % heads * qh
    K += n // heads * kb + n % heads * kh
    V += n // heads * vb + n % heads * vh
    VISIBLE += n // heads * mb + n % heads * mh
    STATES += (n * chunks + chunk) * (D * E + D)
    numerator, denominator = tl.zeros((BT, BE), tl.float32), tl.zeros((BT,), tl.float32)
    for d in range(0, D, BD):
        q = round_tf32(tile(Q, qt, first, length, d, D, Q, offset, MAP, False, BT, BD), PRECISION)
        state = tile(STATES, E, d, D, e, E, Q, offset, NONE, False, BD, BE)
        numerator = whole_product(q, state, numerator, PRECISION)
        denominator += tl.sum(q * row(STATES + D * E, d, D, BD)[None, :], 1)
    if DECAYED:
        since = row(SINCE + n * length, first, length, BT)
        numerator, denominator = numerator * since[:, None], denominator * since
    if CAUSAL:
        for other in range(chunk * CHUNK, first + BT, BT):
            pairs = scores(
                Q, qt, first, length, K, kt, other, keys, D, VISIBLE, offset, MAP, HAS_MASK, PRECISION, BT, BD
            )
            if DECAYED:
                pairs *= between(LOGS + n * length, low, first, other, length, BT)
            pairs = round_tf32(pairs, PRECISION)
            v = tile(V, vt, other, keys, e, E, VISIBLE, offset, NONE, HAS_MASK, BT, BE)
            numerator = tl.dot(pairs, v, numerator, input_precision=PRECISION)
            denominator += tl.sum(pairs, 1)
    denominator = denominator + eps if NORMALIZED else tl.full((BT,), 1.0, tl.float32)
    nothing = tl.abs(denominator) < SMALLEST
    factors = tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, denominator))
    out = numerator * factors[:, None]
    store_tile(OUT + n * length * E, E, first, length, e, E, out, BT, BE)
    if KEEP:
        rest = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        store_tile(REST + n * length * E, E, first, length, e, E, rest, BT, BE)
    rows = first + tl.arange(0, BT)
    tl.store(FACTORS + n * length + rows, factors, mask=(rows < length) & (e == 0))
