"""Gradients of pools with biases in a window: keys are to queries what queries are to keys, with ``1 / denominator``.

With g the gradients, ``p_ij = exp(w_ij + k_j - l_i)`` the shares, l the logarithms of denominators, s gates and o
outputs: ``dv_j = sum_i p_ij s_i g_i``, ``dk_j = sum_i p_ij (s_i g_i v_j - g_i o_i)``, and ``dw_ij`` is the sum over
channels of the terms of ``dk_j``. So ``exp(-l_i)`` is pooled as ``exp(k_j)`` is in the forward pass.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.pooling.kernels import FLOOR, position
from fast_attention.gpu.windowed.kernels import key_tile, outside, write_tile_pool
from fast_attention.gpu.windowed.tiles import (
    SLACK,
    gathered,
    one_column,
    query_tile,
    weights,
)  # fmt: skip


@triton.jit
def of_queries(
    Q, OUT, REST, GRAD, LOGS, SHIFT, DQ, POOLS, heads, length, C, blocks, qb, qh, qt, gb, gh, gt, sh, st,
    HAS_REST: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and the pool of every tile of them, as keys outside of their windows read it."""
    columns, block, n = position(C, blocks, BC)
    Q, GRAD = Q + n // heads * qb + n % heads * qh, GRAD + n // heads * gb + n % heads * gh
    rows = (block * BT + tl.arange(0, BT))[:, None]
    x, a, b, dq = query_tile(
        Q, OUT, REST, GRAD, LOGS, qt, gt, rows, n * length + rows, columns[None, :], length, C, HAS_REST
    )
    inside = (rows < length) & (columns < C)[None, :]
    tl.store(DQ + (n * length + rows) * C + columns[None, :], dq.to(DQ.dtype.element_ty), mask=inside)
    shift = tl.load(SHIFT + n % heads * sh + rows * st, mask=rows < length, other=0.0)
    x = tl.where(x > 0.5 * FLOOR, x - shift, FLOOR)
    write_tile_pool(POOLS + (n * blocks + block) * 3 * C, columns, C, x, a, b)


@triton.jit
def of_keys(
    Q, K, V, VISIBLE, BAND, SHIFT, LOWEST, OUT, REST, GRAD, LOGS, BEFORE, BEHIND, DK, DV,
    heads, length, C, reach, blocks, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt, bh, bt, sh, st,
    CAUSAL: tl.constexpr, STRICT: tl.constexpr, HAS_REST: tl.constexpr, HAS_MASK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values: BEFORE and BEHIND are pools of queries."""
    columns, block, n = position(C, blocks, BC)
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, GRAD = V + n // heads * vb + n % heads * vh, GRAD + n // heads * gb + n % heads * gh
    VISIBLE += n // heads * mb + n % heads * mh
    BAND, SHIFT = BAND + n % heads * bh, SHIFT + n % heads * sh
    keys, around, slack = block * BT + tl.arange(0, BT), tl.cdiv(reach, BT), tl.load(LOWEST) + SLACK
    far = n * blocks * 3 * C
    top, one, two = outside(
        BEFORE + far, BEHIND + far, block, around, blocks, columns, C, not (STRICT or CAUSAL), not STRICT, BC
    )
    nothing = tl.zeros((BT, BC), tl.float32)
    top, one, two = top[None, :] + nothing, one[None, :] + nothing, two[None, :] + nothing
    for at in range(block if CAUSAL else block - around, block + around + 1):
        rows = at * BT + tl.arange(0, BT)
        x, a, b, _ = query_tile(
            Q, OUT, REST, GRAD, LOGS, qt, gt, rows[:, None], (n * length + rows)[:, None], columns[None, :], length, C,
            HAS_REST,
        )  # fmt: skip
        w = weights(BAND, SHIFT, bt, st, rows[None, :], keys[:, None], length, reach, CAUSAL, STRICT)
        top, one, two = gathered(top, one, two, w, x, a, b, slack, BT)
    k, v, ones = key_tile(K, V, VISIBLE, kt, vt, keys[:, None], columns[None, :], length, C, HAS_MASK)
    weight = ones * tl.exp(tl.where(ones > 0, k + top, FLOOR))
    inside = (keys < length)[:, None] & (columns < C)[None, :]
    where = (n * length + keys)[:, None] * C + columns[None, :]
    tl.store(DK + where, (weight * (v * one - two)).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + where, (weight * one).to(DV.dtype.element_ty), mask=inside)


@triton.jit
def of_biases(
    Q, K, V, VISIBLE, BAND, SHIFT, LOWEST, OUT, REST, GRAD, LOGS, DB, heads, length, C, reach, blocks, groups, members,
    parts, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt, bh, bt, sh, st,
    CAUSAL: tl.constexpr, STRICT: tl.constexpr, HAS_REST: tl.constexpr, HAS_MASK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of biases, DB (parts, groups, length, taps): of every one by one program, which walks some heads.

    ``groups`` kinds of biases serve ``members`` heads of all sequences each; a part of them is a program's.
    """
    program, around = tl.program_id(0).to(tl.int64), tl.cdiv(reach, BT)
    sides = around + 1 if CAUSAL else 2 * around + 1
    side, block, rest = program % sides, program // sides % blocks, program // sides // blocks
    group, part = rest % groups, rest // groups
    rows, keys = block * BT + tl.arange(0, BT), (block + side - around) * BT + tl.arange(0, BT)
    slack = tl.load(LOWEST) + SLACK
    total = tl.zeros((BT, BT), tl.float32)
    each = tl.cdiv(members, parts)
    for member in range(part * each, tl.minimum(part * each + each, members)):
        n = member * groups + group
        query, grad = Q + n // heads * qb + n % heads * qh, GRAD + n // heads * gb + n % heads * gh
        key, value = K + n // heads * kb + n % heads * kh, V + n // heads * vb + n % heads * vh
        visible = VISIBLE + n // heads * mb + n % heads * mh
        for first in range(0, C, BC):
            columns = first + tl.arange(0, BC)
            x, a, b, _ = query_tile(
                query, OUT, REST, grad, LOGS, qt, gt, rows[:, None], (n * length + rows)[:, None], columns[None, :],
                length, C, HAS_REST,
            )  # fmt: skip
            k, v, ones = key_tile(key, value, visible, kt, vt, keys[None, :], columns[:, None], length, C, HAS_MASK)
            total += shares(x, a, b, k, v, ones, slack, BT)
    w = weights(
        BAND + group * bh, SHIFT + group * sh, bt, st, rows[:, None], keys[None, :], length, reach, CAUSAL, STRICT
    )
    offsets = keys[None, :] - rows[:, None]
    near = (w > 0) & (offsets <= reach) & (offsets >= -reach)
    where = ((part * groups + group) * length + rows)[:, None] * (2 * reach + 1) + offsets + reach
    tl.store(DB + where, w * total, mask=near)


@triton.jit
def shares(x, a, b, k, v, ones, slack, BT: tl.constexpr):
    """Of a tile of queries (BT, BC) and one of keys (BC, BT): ``sum exp(k_j + x_i) (a_i v_j - b_i)`` over channels."""
    largest = tl.max(k, 1)
    least = tl.min(tl.where(ones > 0, k, largest[:, None]), 1)
    pairs = tl.zeros((BT, BT), tl.float32)
    if tl.max(largest - least, 0) <= slack:
        e = ones * tl.exp(k - largest[:, None])
        factor = tl.exp(tl.minimum(x + largest[None, :], 80.0))
        pairs += tl.dot(factor * a, e * v, input_precision="tf32x3")
        pairs -= tl.dot(factor * b, e, input_precision="tf32x3")
    else:
        for at in range(0, BT):
            key, value, shown = one_column(k, at, BT), one_column(v, at, BT), one_column(ones, at, BT)
            terms = shown * tl.exp(tl.minimum(key[None, :] + x, 80.0)) * (a * value[None, :] - b)
            pairs += tl.where((tl.arange(0, BT) == at)[None, :], tl.sum(terms, 1)[:, None], 0.0)
    return pairs
