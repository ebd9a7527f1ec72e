"""Gradients of queries, keys and values, each block by its own program: no two write to one place.

``factors`` are one over the denominators, ``weights`` the denominators' gradients. States are what queries read (of
keys and values before a chunk) and what keys give (of queries and scaled gradients behind it). Products are made in
the order in which they are used, so that nothing that a product made is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.decays import after, between
from fast_attention.gpu.tiles import (
    NONE,
    feature,
    load_mask,
    row,
    slope,
    store_row,
    store_tile,
    tile,
    turned,
    whole_product,
)


@triton.jit
def of_queries(
    Q, K, V, VISIBLE, GRAD, FACTORS, WEIGHTS, STATES, DECAYS, LOGS, OUT, OF_LOGS, heads, length, keys, D, E, chunks,
    low, offset,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, DECAYED: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``(dn_i S^T + w_i z + sum_j (dn_i . v_j + w_i) phi(k_j)) phi'(q_i)``, dn the scaled gradients, w the weights."""
    parts, blocks = tl.cdiv(D, BD), tl.cdiv(length, BT)
    program = tl.program_id(0).to(tl.int64)
    d, at = (program % parts).to(tl.int32) * BD, program // parts
    n, first = at // blocks, (at % blocks).to(tl.int32) * BT
    chunk = first // CHUNK if CAUSAL else 0
    Q += n // heads * qb + n % heads * qh
    K += n // heads * kb + n % heads * kh
    V += n // heads * vb + n % heads * vh
    GRAD += n // heads * gb + n % heads * gh
    VISIBLE += n // heads * mb + n % heads * mh
    STATES += (n * chunks + chunk) * (D * E + D)
    factors = row(FACTORS + n * length, first, length, BT)[:, None]
    weights = row(WEIGHTS + n * length, first, length, BT)[:, None]
    total = tl.zeros((BT, BD), tl.float32)
    for e in range(0, E, BE):
        grad = tile(GRAD, gt, first, length, e, E, GRAD, 0.0, NONE, False, BT, BE)
        total = whole_product(grad, turned(STATES, E, d, D, e, E, Q, 0.0, NONE, False, BD, BE), total, PRECISION)
    total = total * factors + weights * row(STATES + D * E, d, D, BD)[None, :]
    if DECAYED:
        total *= row(DECAYS + n * length, first, length, BT)[:, None]
    if CAUSAL:
        for other in range(chunk * CHUNK, first + BT, BT):
            pairs = tl.zeros((BT, BT), tl.float32)
            for e in range(0, E, BE):
                grad = tile(GRAD, gt, first, length, e, E, GRAD, 0.0, NONE, False, BT, BE)
                v = turned(V, vt, other, keys, e, E, VISIBLE, 0.0, NONE, HAS_MASK, BT, BE)
                pairs = tl.dot(grad, v, pairs, input_precision=PRECISION)
            later = other + tl.arange(0, BT)[None, :] > first + tl.arange(0, BT)[:, None]
            pairs = tl.where(later, 0.0, pairs * factors + weights)
            if DECAYED:
                pairs *= between(LOGS + n * length, low, first, other, length, BT)
            k = tile(K, kt, other, keys, d, D, VISIBLE, offset, MAP, HAS_MASK, BT, BD)
            total = tl.dot(pairs, k, total, input_precision=PRECISION)
    q = tile(Q, qt, first, length, d, D, Q, 0.0, NONE, False, BT, BD)
    if DECAYED:  # every program of columns writes a row of its own
        of_log = total * feature(q, offset, MAP)
        store_row(OF_LOGS + (n * parts + program % parts) * length, first, length, of_log, BT)
    total *= slope(q, MAP)
    store_tile(OUT + n * length * D, D, first, length, d, D, total, BT, BD)


@triton.jit
def of_keys(
    Q, K, V, VISIBLE, GRAD, FACTORS, WEIGHTS, STATES, DECAYS, LOGS, OUT, OF_LOGS, heads, length, keys, D, E, chunks,
    low, offset,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, DECAYED: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``(v_j R^T + r + sum_i (v_j . dn_i + w_i) phi(q_i)) phi'(k_j)``, R and r sums over queries behind the chunk."""
    parts, blocks = tl.cdiv(D, BD), tl.cdiv(keys, BT)
    program = tl.program_id(0).to(tl.int64)
    d, at = (program % parts).to(tl.int32) * BD, program // parts
    n, first = at // blocks, (at % blocks).to(tl.int32) * BT
    chunk = first // CHUNK if CAUSAL else 0
    Q += n // heads * qb + n % heads * qh
    K += n // heads * kb + n % heads * kh
    V += n // heads * vb + n % heads * vh
    GRAD += n // heads * gb + n % heads * gh
    VISIBLE += n // heads * mb + n % heads * mh
    STATES += (n * chunks + chunk) * (D * E + D)
    total = tl.zeros((BT, BD), tl.float32) + row(STATES + D * E, d, D, BD)[None, :]
    for e in range(0, E, BE):
        v = tile(V, vt, first, keys, e, E, VISIBLE, 0.0, NONE, HAS_MASK, BT, BE)
        total = whole_product(v, turned(STATES, E, d, D, e, E, Q, 0.0, NONE, False, BD, BE), total, PRECISION)
    if DECAYED:
        total *= row(DECAYS + n * keys, first, keys, BT)[:, None]
    if CAUSAL:
        for other in range(first, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
            pairs = tl.zeros((BT, BT), tl.float32)
            factors = row(FACTORS + n * length, other, length, BT)[None, :]
            for e in range(0, E, BE):
                v = tile(V, vt, first, keys, e, E, VISIBLE, 0.0, NONE, HAS_MASK, BT, BE)
                grad = turned(GRAD, gt, other, length, e, E, GRAD, 0.0, NONE, False, BT, BE)
                pairs = tl.dot(v, grad, pairs, input_precision=PRECISION)
            earlier = other + tl.arange(0, BT)[None, :] < first + tl.arange(0, BT)[:, None]
            weights = row(WEIGHTS + n * length, other, length, BT)[None, :]
            pairs = tl.where(earlier, 0.0, pairs * factors + weights)
            if DECAYED:
                pairs *= after(LOGS + n * length, low, first, other, length, BT)
            q = tile(Q, qt, other, length, d, D, Q, offset, MAP, False, BT, BD)
            total = tl.dot(pairs, q, total, input_precision=PRECISION)
    k = tile(K, kt, first, keys, d, D, VISIBLE, 0.0, NONE, HAS_MASK, BT, BD)
    total = tl.where(load_mask(VISIBLE, first, keys, HAS_MASK, BT)[:, None], total, 0.0)
    if DECAYED:
        of_log = total * feature(k, offset, MAP)
        store_row(OF_LOGS + (n * parts + program % parts) * keys, first, keys, of_log, BT)
    total *= slope(k, MAP)
    store_tile(OUT + n * keys * D, D, first, keys, d, D, total, BT, BD)


@triton.jit
def of_values(
    Q, K, VISIBLE, GRAD, FACTORS, STATES, DECAYS, LOGS, OUT, heads, length, keys, D, E, chunks, low, offset,
    qb, qh, qt, kb, kh, kt, mb, mh, gb, gh, gt,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, DECAYED: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``phi(k_j) R + sum_i (phi(k_j) . phi(q_i)) dn_i``."""
    parts, blocks = tl.cdiv(E, BE), tl.cdiv(keys, BT)
    program = tl.program_id(0).to(tl.int64)
    e, at = (program % parts).to(tl.int32) * BE, program // parts
    n, first = at // blocks, (at % blocks).to(tl.int32) * BT
    chunk = first // CHUNK if CAUSAL else 0
    Q += n // heads * qb + n % heads * qh
    K += n // heads * kb + n % heads * kh
    GRAD += n // heads * gb + n % heads * gh
    VISIBLE += n // heads * mb + n % heads * mh
    STATES += (n * chunks + chunk) * (D * E + D)
    total = tl.zeros((BT, BE), tl.float32)
    for d in range(0, D, BD):
        k = tile(K, kt, first, keys, d, D, VISIBLE, offset, MAP, HAS_MASK, BT, BD)
        total = tl.dot(k, tile(STATES, E, d, D, e, E, Q, 0.0, NONE, False, BD, BE), total, input_precision=PRECISION)
    if DECAYED:
        total *= row(DECAYS + n * keys, first, keys, BT)[:, None]
    if CAUSAL:
        for other in range(first, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
            pairs = tl.zeros((BT, BT), tl.float32)
            for d in range(0, D, BD):
                k = tile(K, kt, first, keys, d, D, VISIBLE, offset, MAP, HAS_MASK, BT, BD)
                q = turned(Q, qt, other, length, d, D, Q, offset, MAP, False, BT, BD)
                pairs = tl.dot(k, q, pairs, input_precision=PRECISION)
            if DECAYED:
                pairs *= after(LOGS + n * length, low, first, other, length, BT)
            earlier = other + tl.arange(0, BT)[None, :] < first + tl.arange(0, BT)[:, None]
            factors = row(FACTORS + n * length, other, length, BT)[:, None]
            grad = tile(GRAD, gt, other, length, e, E, GRAD, 0.0, NONE, False, BT, BE) * factors
            total = tl.dot(tl.where(earlier, 0.0, pairs), grad, total, input_precision=PRECISION)
    store_tile(OUT + n * keys * E, E, first, keys, e, E, total, BT, BE)
