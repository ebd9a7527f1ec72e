"""Tiles of tokens and of weights, and sums of tiles that keep a largest logarithm for every row and channel.

A weight of a query and a key is ``exp(bias - shift_i)`` in the window and ``exp(-shift_i)`` around it; ``shift_i`` is
the largest bias of the query's window, at least 0 unless the window is all that it sees.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.pooling.kernels import FLOOR

SLACK = tl.constexpr(60.0)  # how far a tile's logarithms may lie apart: beyond, its tokens are taken one by one


@triton.jit
def tile(pointer, rows, stride, columns, read):
    """Channels of some tokens in float32, zeros where they are not to be read."""
    return tl.load(pointer + rows * stride + columns, mask=read, other=0.0).to(tl.float32)


@triton.jit
def shown_rows(VISIBLE, rows, length, HAS_MASK: tl.constexpr):
    """Which tokens exist and may be shown."""
    inside = (rows >= 0) & (rows < length)
    if HAS_MASK:
        return inside & (tl.load(VISIBLE + rows, mask=inside, other=0) != 0)
    else:
        return inside


@triton.jit
def weights(
    BAND, SHIFT, bt, st, i, j, length, reach, CAUSAL: tl.constexpr, STRICT: tl.constexpr
):  # fmt: skip
    """Weights of pairs of queries ``i`` and keys ``j``, of which one lies in a row and one in a column."""
    exists = (i >= 0) & (i < length) & (j >= 0) & (j < length)
    if CAUSAL:
        exists = exists & (j <= i)
    near = exists & (j - i <= reach) & (i - j <= reach)
    bias = tl.load(BAND + i * bt + (j - i + reach), mask=near, other=0.0)
    logs = bias - tl.load(SHIFT + i * st, mask=(i >= 0) & (i < length), other=0.0)
    if STRICT:
        exists = near
    return tl.where(exists, tl.exp(tl.where(exists, logs, 0.0)), 0.0)


@triton.jit
def one_row(x, at, BT: tl.constexpr):
    """Row number ``at`` of a tile."""
    return tl.sum(tl.where((tl.arange(0, BT) == at)[:, None], x, 0.0), 0)


@triton.jit
def one_column(x, at, BT: tl.constexpr):
    """Column number ``at`` of a tile."""
    return tl.sum(tl.where((tl.arange(0, BT) == at)[None, :], x, 0.0), 1)


@triton.jit
def spread(x):
    """The largest logarithm of every channel, and how far its least one lies below it at most."""
    largest = tl.max(x, 0)
    least = tl.min(tl.where(x > 0.5 * FLOOR, x, largest[None, :]), 0)
    return largest, tl.max(largest - least, 0)


@triton.jit
def gathered(top, one, two, w, x, first, second, slack, BT: tl.constexpr):
    """Sums over ``exp(top)`` of every row and channel, and those of a tile: ``w`` times ``exp(x)`` times its terms."""
    largest, apart = spread(x)
    if apart <= slack:
        e = tl.exp(x - largest[None, :])
        new = tl.where((tl.max(w, 1) > 0)[:, None], tl.maximum(top, largest[None, :]), top)
        old, more = tl.exp(top - new), tl.exp(tl.minimum(largest[None, :] - new, 0.0))
        one = one * old + tl.dot(w, e * first, input_precision="tf32x3") * more
        two = two * old + tl.dot(w, e * second, input_precision="tf32x3") * more
        top = new
    else:
        for at in range(0, BT):
            factor, log = one_column(w, at, BT)[:, None], one_row(x, at, BT)[None, :]
            new = tl.where(factor > 0, tl.maximum(top, log), top)
            old, more = tl.exp(top - new), factor * tl.exp(tl.minimum(log - new, 0.0))
            one = one * old + more * one_row(first, at, BT)[None, :]
            two = two * old + more * one_row(second, at, BT)[None, :]
            top = new
    return top, one, two


@triton.jit
def query_tile(
    Q, OUT, REST, GRAD, LOGS, qt, gt, rows, row, columns, length, C, HAS_REST: tl.constexpr
):  # fmt: skip
    """For queries: what keys gain from them, ``log(1 / denominator)``, ``s g`` and ``g o``; and their own gradient."""
    read = (rows >= 0) & (rows < length) & (columns < C)
    grad, out = tile(GRAD, rows, gt, columns, read), tile(OUT, row, C, columns, read)
    if HAS_REST:
        out += tile(REST, row, C, columns, read)
    log = tl.load(LOGS + row * C + columns, mask=read, other=FLOOR)
    gate = tl.sigmoid(tile(Q, rows, qt, columns, read))
    some = log > 0.5 * FLOOR
    product = tl.where(some, grad * out, 0.0)
    return tl.where(some, -log, FLOOR), tl.where(some, grad * gate, 0.0), product, product * (1.0 - gate)
