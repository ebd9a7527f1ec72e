"""Outputs of queries over a pool of keys before their tile's neighbours, one of those behind, and near ones by tiles.

Pools are as ``gpu/pooling/kernels.py`` has them, one for each tile of tokens.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.pooling.kernels import FLOOR, joined, no_keys, position, read_pool, write_outputs
from fast_attention.gpu.windowed.tiles import SLACK, gathered, shown_rows, tile, weights


@triton.jit
def key_tile(K, V, VISIBLE, kt, vt, rows, columns, length, C, HAS_MASK: tl.constexpr):
    """Keys, ``FLOOR`` where none is shown, values, and ones; nothing of a hidden token is read."""
    shown = shown_rows(VISIBLE, rows, length, HAS_MASK)
    read = shown & (columns < C)
    k = tl.where(read, tile(K, rows, kt, columns, read), FLOOR)
    return k, tile(V, rows, vt, columns, read), tl.where(read, 1.0, 0.0)


@triton.jit
def tile_pools(
    K, V, VISIBLE, POOLS, heads, length, C, blocks, kb, kh, kt, vb, vh, vt, mb, mh,
    HAS_MASK: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The pool of every tile of keys."""
    columns, block, n = position(C, blocks, BC)
    K, V = K + n // heads * kb + n % heads * kh, V + n // heads * vb + n % heads * vh
    VISIBLE += n // heads * mb + n % heads * mh
    rows = (block * BT + tl.arange(0, BT))[:, None]
    k, v, ones = key_tile(K, V, VISIBLE, kt, vt, rows, columns[None, :], length, C, HAS_MASK)
    write_tile_pool(POOLS + (n * blocks + block) * 3 * C, columns, C, k, v, ones)


@triton.jit
def write_tile_pool(pointer, columns, C, x, first, second):
    """The pool of a tile of logarithms and its terms."""
    largest, inside = tl.max(x, 0), columns < C
    e = tl.exp(x - largest[None, :])
    tl.store(pointer + columns, largest, mask=inside)
    tl.store(pointer + C + columns, tl.sum(e * first, 0), mask=inside)
    tl.store(pointer + 2 * C + columns, tl.sum(e * second, 0), mask=inside)


@triton.jit
def running_pools(POOLS, C, blocks, BACKWARDS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):
    """Every tile's pool becomes that of it and all tiles before it, or behind it; ``BN`` of them at a time."""
    columns, _, n = position(C, 1, BC)
    top, one, two = no_keys(BC)
    for step in range(0, tl.cdiv(blocks, BN)):
        rows = step * BN + tl.arange(0, BN)
        read = (rows < blocks)[:, None] & (columns < C)[None, :]
        rows = n * blocks + (blocks - 1 - rows if BACKWARDS else rows)
        where = POOLS + rows[:, None] * 3 * C + columns[None, :]
        tops = tl.load(where, mask=read, other=FLOOR)
        ones, twos = tl.load(where + C, mask=read, other=0.0), tl.load(where + 2 * C, mask=read, other=0.0)
        tops, ones, twos = tl.associative_scan((tops, ones, twos), 0, joined)
        tops, ones, twos = joined(top[None, :], one[None, :], two[None, :], tops, ones, twos)
        tl.store(where, tops, mask=read)
        tl.store(where + C, ones, mask=read)
        tl.store(where + 2 * C, twos, mask=read)
        last = (tl.arange(0, BN) == BN - 1)[:, None]
        top, one = tl.sum(tl.where(last, tops, 0.0), 0), tl.sum(tl.where(last, ones, 0.0), 0)
        two = tl.sum(tl.where(last, twos, 0.0), 0)


@triton.jit
def far_pool(POOLS, at, blocks, columns, C):
    """The pool in row ``at``; that of no tokens where there is none."""
    exists = (at >= 0) & (at < blocks)
    top, one, two = read_pool(POOLS + tl.where(exists, at, 0) * 3 * C, columns, C)
    return tl.where(exists, top, FLOOR), tl.where(exists, one, 0.0), tl.where(exists, two, 0.0)


@triton.jit
def outside(
    BEFORE, BEHIND, block, around, blocks, columns, C, HAS_BEFORE: tl.constexpr, HAS_BEHIND: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """The pool of all tiles more than ``around`` before tile number ``block``, and of those behind it."""
    top, one, two = no_keys(BC)
    if HAS_BEFORE:
        top, one, two = far_pool(BEFORE, block - around - 1, blocks, columns, C)
    if HAS_BEHIND:
        other, more, further = far_pool(BEHIND, block + around + 1, blocks, columns, C)
        top, one, two = joined(top, one, two, other, more, further)
    return top, one, two


@triton.jit
def outputs(
    Q, K, V, VISIBLE, BAND, SHIFT, LOWEST, BEFORE, BEHIND, OUT, REST, LOGS, heads, length, C, reach, blocks,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, bh, bt, sh, st,
    CAUSAL: tl.constexpr, STRICT: tl.constexpr, HAS_MASK: tl.constexpr, LOGGED: tl.constexpr, ROUNDED: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``sigmoid(q_i)`` times numerators over denominators; what rounding took, and the logarithms of denominators."""
    columns, block, n = position(C, blocks, BC)
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, VISIBLE = V + n // heads * vb + n % heads * vh, VISIBLE + n // heads * mb + n % heads * mh
    BAND, SHIFT = BAND + n % heads * bh, SHIFT + n % heads * sh
    rows, around, slack = block * BT + tl.arange(0, BT), tl.cdiv(reach, BT), tl.load(LOWEST) + SLACK
    inside = (rows < length)[:, None] & (columns < C)[None, :]
    far = n * blocks * 3 * C
    top, one, two = outside(
        BEFORE + far, BEHIND + far, block, around, blocks, columns, C, not STRICT, not (STRICT or CAUSAL), BC
    )
    around_window = tl.exp(-tl.load(SHIFT + rows * st, mask=rows < length, other=0.0))[:, None]
    top = top[None, :] + tl.zeros((BT, BC), tl.float32)
    one, two = around_window * one[None, :], around_window * two[None, :]
    for at in range(block - around, block + 1 if CAUSAL else block + around + 1):
        keys = at * BT + tl.arange(0, BT)
        k, v, ones = key_tile(K, V, VISIBLE, kt, vt, keys[:, None], columns[None, :], length, C, HAS_MASK)
        w = weights(BAND, SHIFT, bt, st, rows[:, None], keys[None, :], length, reach, CAUSAL, STRICT)
        w = tl.where(shown_rows(VISIBLE, keys, length, HAS_MASK)[None, :], w, 0.0)
        top, one, two = gathered(top, one, two, w, k, v, ones, slack, BT)
    gate = tl.sigmoid(tile(Q, rows[:, None], qt, columns[None, :], inside))
    where = (n * length + rows)[:, None] * C + columns[None, :]
    write_outputs(OUT, REST, LOGS, where, inside, top, one, two, gate, LOGGED, ROUNDED)
