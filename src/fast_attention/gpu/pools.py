"""Pools of keys, channel by channel: sums of ``exp(k_j - maximum) v_j`` and of ``exp(k_j - maximum)``, and the maximum.

A program walks through the tokens of one chunk for a block of channels; chunks run side by side. A pool is a state of
as many exponentials as there are channels, each with one value (``gpu/sums.py``): a row of 3 C numbers in float32,
numerators, denominators, maxima. Pointers and hidden tokens as in ``gpu/tiles.py``.

Gradients: with g those of outputs, ``w_ij = exp(k_j - l_i)`` the weights, l the logarithms of denominators, which never
fall, ``dv_j = sum_{i >= j} w_ij s_i g_i`` and ``dk_j = sum_{i >= j} w_ij (s_i g_i v_j - g_i o_i)``; s are gates, o
outputs. Sums over i are kept over ``exp(-l)`` of the earliest token in them, so that no factor is above one, and are
states too, of scale -l.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fast_attention.gpu.calls import chunks_of, launch, outputs_like, power, strides
from fast_attention.gpu.launching import CHANNELS, Read, Sums, Tokens
from fast_attention.gpu.tiles import FLOOR, of_head

SHORTEST, LONGEST = 64, 1024  # tokens of a chunk


@triton.jit
def numbers(pointer, columns, width):
    """Channels of one token in float32, zeros beyond the last."""
    return tl.load(pointer + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def key(K, V, kt, vt, t, columns, width, visible):
    """Key and value of a token and whether it may be shown; nothing of a hidden one is read."""
    shown = tl.load(visible + t) != 0 if visible is not None else t >= 0
    read = (columns < width) & shown
    k = tl.load(K + t * kt + columns, mask=read, other=0.0).to(tl.float32)
    return k, tl.load(V + t * vt + columns, mask=read, other=0.0).to(tl.float32), shown


@triton.jit
def joined(top, numerator, denominator, other, other_numerator, other_denominator):
    """Two pools as one."""
    larger = tl.maximum(top, other)
    a, b = tl.exp(top - larger), tl.exp(other - larger)
    return larger, numerator * a + other_numerator * b, denominator * a + other_denominator * b


@triton.jit
def no_keys(BC: tl.constexpr):
    """The pool before the first key."""
    return tl.full((BC,), FLOOR, tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)


@triton.jit
def add(top, numerator, denominator, k, v, shown):
    """A pool and one key."""
    one = tl.where(shown, tl.full(k.shape, 1.0, tl.float32), 0.0)
    return joined(top, numerator, denominator, tl.where(shown, k, FLOOR), one * v, one)


@triton.jit
def read_pool(pointer, columns, width):
    """The three parts of a pool."""
    top = numbers(pointer + 2 * width, columns, width)
    return top, numbers(pointer, columns, width), numbers(pointer + width, columns, width)


@triton.jit
def write_pool(pointer, columns, width, top, numerator, denominator):
    """The three parts of a pool."""
    inside = columns < width
    tl.store(pointer + columns, numerator, mask=inside)
    tl.store(pointer + width + columns, denominator, mask=inside)
    tl.store(pointer + 2 * width + columns, top, mask=inside)


@triton.jit
def position(width, chunks, BC: tl.constexpr):
    """Place of a program: its channels, chunk, sequence and head; numbers of tokens are 64 bits wide from here on."""
    program, parts = tl.program_id(0).to(tl.int64), tl.cdiv(width, BC)
    columns, at = (program % parts).to(tl.int32) * BC + tl.arange(0, BC), program // parts
    return columns, at % chunks, at // chunks


@triton.jit
def chunk_pools(
    K, V, VISIBLE, POOLS, heads, length, C, size, chunks, kb, kh, kt, vb, vh, vt, mb, mh,
    BC: tl.constexpr,
):  # fmt: skip
    """The pool of every chunk."""
    columns, chunk, n = position(C, chunks, BC)
    K, V, VISIBLE = of_head(K, n, heads, kb, kh), of_head(V, n, heads, vb, vh), of_head(VISIBLE, n, heads, mb, mh)
    top, numerator, denominator = no_keys(BC)
    for t in range(chunk * size, tl.minimum(chunk * size + size, length)):
        k, v, shown = key(K, V, kt, vt, t, columns, C, VISIBLE)
        top, numerator, denominator = add(top, numerator, denominator, k, v, shown)
    write_pool(POOLS + (n * chunks + chunk) * 3 * C, columns, C, top, numerator, denominator)


@triton.jit
def outputs(
    Q, K, V, VISIBLE, POOLS, OUT, REST, LOGS, LAST, heads, length, C, size, chunks,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, CAUSAL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``sigmoid(q_i)`` times numerators over denominators; what rounding took, and the logarithms of denominators.

    Not CAUSAL: all queries read one pool. LAST: the pool after the tokens.
    """
    columns, chunk, n = position(C, chunks, BC)
    inside = columns < C
    Q, K, V = of_head(Q, n, heads, qb, qh), of_head(K, n, heads, kb, kh), of_head(V, n, heads, vb, vh)
    VISIBLE = of_head(VISIBLE, n, heads, mb, mh)
    top, numerator, denominator = no_keys(BC)
    if POOLS is not None:
        at = n * chunks + chunk if CAUSAL else n
        top, numerator, denominator = read_pool(POOLS + at * 3 * C, columns, C)
    for t in range(chunk * size, tl.minimum(chunk * size + size, length)):
        if CAUSAL:
            k, v, shown = key(K, V, kt, vt, t, columns, C, VISIBLE)
            top, numerator, denominator = add(top, numerator, denominator, k, v, shown)
        gate = tl.sigmoid(numbers(Q + t * qt, columns, C))
        where, nothing = (n * length + t) * C + columns, denominator == 0
        divisor = tl.where(nothing, 1.0, denominator)
        out = tl.where(nothing, 0.0, numerator / divisor) * gate
        tl.store(OUT + where, out.to(OUT.dtype.element_ty), mask=inside)
        if REST is not None:
            rest = out - out.to(OUT.dtype.element_ty).to(tl.float32)
            tl.store(REST + where, rest.to(OUT.dtype.element_ty), mask=inside)
        if LOGS is not None:
            tl.store(LOGS + where, tl.where(nothing, FLOOR, top + tl.log(divisor)), mask=inside)
    if LAST is not None:
        write_pool(LAST + n * 3 * C, columns, C, top, numerator, denominator)


@triton.jit
def of_query(Q, OUT, REST, GRAD, t, qt, gt, row, columns, C):
    """``s g``, ``-g o`` and the query's own gradient, ``g o (1 - s)``."""
    grad = numbers(GRAD + t * gt, columns, C)
    out = numbers(OUT + row * C, columns, C)
    if REST is not None:
        out += numbers(REST + row * C, columns, C)
    product = grad * out
    gate = tl.sigmoid(numbers(Q + t * qt, columns, C))
    return grad * gate, -product, product * (1.0 - gate)


@triton.jit
def of_queries(
    Q, OUT, REST, GRAD, LOGS, SUMS, DQ, heads, length, C, size, chunks, qb, qh, qt, gb, gh, gt,
    CAUSAL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, and each chunk's sums, which keys before it take: over ``exp(-l)`` of its first token."""
    columns, chunk, n = position(C, chunks, BC)
    inside = columns < C
    Q, GRAD = of_head(Q, n, heads, qb, qh), of_head(GRAD, n, heads, gb, gh)
    a, b, scale = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    first, last = chunk * size, tl.minimum(chunk * size + size, length)
    for back in range(0, last - first):
        t = last - 1 - back
        row = n * length + t
        d_numerator, d_denominator, dq = of_query(Q, OUT, REST, GRAD, t, qt, gt, row, columns, C)
        if CAUSAL:
            log = numbers(LOGS + row * C, columns, C)
            decay = tl.exp(tl.minimum(log - scale, 0.0))  # of nothing, in the first step
            a, b, scale = a * decay + d_numerator, b * decay + d_denominator, log
        else:
            a, b = a + d_numerator, b + d_denominator
        tl.store(DQ + row * C + columns, dq.to(DQ.dtype.element_ty), mask=inside)
    write_pool(SUMS + (n * chunks + chunk) * 3 * C, columns, C, -scale, a, b)


@triton.jit
def of_keys(
    Q, K, V, VISIBLE, OUT, REST, GRAD, LOGS, SUMS, DK, DV, heads, length, C, size, chunks,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    CAUSAL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values. Not CAUSAL: all of one sum, and nothing of queries is read."""
    columns, chunk, n = position(C, chunks, BC)
    inside = columns < C
    Q, K, V = of_head(Q, n, heads, qb, qh), of_head(K, n, heads, kb, kh), of_head(V, n, heads, vb, vh)
    GRAD, VISIBLE = of_head(GRAD, n, heads, gb, gh), of_head(VISIBLE, n, heads, mb, mh)
    at = n * chunks + chunk if CAUSAL else n
    top, a, b = read_pool(SUMS + at * 3 * C, columns, C)
    scale = -top
    first, last = chunk * size, tl.minimum(chunk * size + size, length)
    for back in range(0, last - first):
        t = last - 1 - back
        row = n * length + t
        if CAUSAL:
            d_numerator, d_denominator, _ = of_query(Q, OUT, REST, GRAD, t, qt, gt, row, columns, C)
            log = numbers(LOGS + row * C, columns, C)
            decay = tl.exp(log - scale)
            a, b, scale = a * decay + d_numerator, b * decay + d_denominator, log
        k, v, shown = key(K, V, kt, vt, t, columns, C, VISIBLE)
        weight = tl.exp(tl.where(shown, k - scale, FLOOR))
        tl.store(DK + row * C + columns, (weight * (v * a + b)).to(DK.dtype.element_ty), mask=inside)
        tl.store(DV + row * C + columns, (weight * a).to(DV.dtype.element_ty), mask=inside)


def _chunk(length: int) -> int:
    """About as many tokens as there are chunks, so that neither walk is long; many where the length is open."""
    if not isinstance(length, int):
        return LONGEST
    return min(max(power(math.isqrt(length)), SHORTEST), LONGEST)


class Launch(Sums):
    """The kernels over one sequence: chunks side by side, channels among programs of one warp, two channels a lane."""

    scaled = True

    def __init__(self, x: Tensor, values: int, begins: Tensor | None = None) -> None:
        (self.batch, self.heads, self.length, self.features), self.begins = x.shape, begins
        self.size = _chunk(self.length) if begins is None else self.length // len(begins)
        self.chunks = chunks_of(self.length, self.size)
        self.like, channels = x, min(power(self.features), CHANNELS)
        self.walks = self.batch * self.heads * -(-self.features // channels)
        self.options = {"BC": channels, "num_warps": 1}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that kernels are told."""
        return self.heads, self.length, self.features, self.size, self.chunks

    def empty(self, *sizes: int) -> Tensor:
        """Memory for results of this batch and these heads."""
        return self.like.new_empty((self.batch, self.heads, *sizes), dtype=torch.float32)

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None, *, keep: bool
    ) -> tuple[Read, Read]:
        """Outputs and the pool after all keys; what the backward pass needs."""
        one = isinstance(self.chunks, int) and self.chunks == 1  # which needs no other kernel
        pools, last = (first, self.empty(3 * self.features)) if one else self.sums(k, v, mask, first)
        out, *saved = self.outputs(q, k, v, mask, pools, is_causal=True, keep=keep, last=last if one else None)
        return (out, last), tuple(saved)

    def sums(self, k: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The pools before every chunk and over all tokens, ``first`` included."""
        pools = self.empty(self.chunks, 3 * self.features)
        launch(
            chunk_pools, self.walks * self.chunks, k, v, mask, pools, *self.sizes, *strides(k, 3), *strides(v, 3),
            *strides(mask, 2), **self.options,
        )  # fmt: skip
        return pools, self.running(pools, first, 1)

    def outputs(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, pools: Tensor | None, *,
        is_causal: bool, keep: bool, last: Tensor | None = None,
    ) -> Read:  # fmt: skip
        """Outputs; if ``keep`` what rounding took of them and, causal, the logarithms of denominators.

        ``last``: memory for the pool behind all tokens, which are one chunk.
        """
        (out, rest), logged = outputs_like(q, self.features, keep=keep), keep and is_causal
        logs = self.empty(self.length, self.features) if logged else self.empty(0)
        launch(
            outputs, self.walks * self.chunks, q, k, v, mask, pools, out, rest if rest.ndim > 1 else None,
            logs if logged else None, last, *self.sizes, *strides(q, 3), *strides(k, 3), *strides(v, 3),
            *strides(mask, 2), CAUSAL=is_causal, **self.options,
        )  # fmt: skip
        return out, rest, logs

    def of_queries(
        self, tokens: Tokens, read: Read, after: Tensor | None, *, is_causal: bool
    ) -> tuple[Tensor, None, None, Tensor, Tensor]:
        """Gradients of queries, the sums behind every chunk, and all of them."""
        (q, *_, grad), (out, rest, logs, *_) = tokens, read
        dq, sums = q.new_empty(q.shape), self.empty(self.chunks, 3 * self.features)
        launch(
            of_queries, self.walks * self.chunks, q, out, rest if rest.ndim > 1 else None, grad, logs, sums, dq,
            *self.sizes, *strides(q, 3), *strides(grad, 3), CAUSAL=is_causal, **self.options,
        )  # fmt: skip
        return dq, None, None, sums, self.running(sums, after, 1, backwards=True)

    def of_keys(
        self, tokens: Tokens, read: Read | None, weights: None, later_sums: Tensor, *, is_causal: bool
    ) -> tuple[Tensor, Tensor, None]:
        """Gradients of keys and values; noncausal, only ``later_sums`` is of queries."""
        (q, k, v, mask, grad), (out, rest, logs, *_) = tokens, read or (None, None, None)
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        launch(
            of_keys, self.walks * self.chunks, q, k, v, mask, out, rest if rest is not None and rest.ndim > 1 else None,
            grad, logs, later_sums, dk, dv, *self.sizes, *strides(q, 3), *strides(k, 3), *strides(v, 3),
            *strides(mask, 2), *strides(grad, 3), CAUSAL=is_causal, **self.options,
        )  # fmt: skip
        return dk, dv, None

    def of_all(self, gradient: Tensor, state: Tensor) -> Tensor:
        """The gradient of a pool that all queries read: of means, which know no scale."""
        denominator = state[..., self.features : 2 * self.features]
        nothing = denominator == 0
        return self.times(gradient, (1.0 / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0))

    def of_weights(self, *given: Any, **named: Any) -> tuple[None]:
        """None: pools have no weights."""
        return (None,)
