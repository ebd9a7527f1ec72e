"""Pools of keys: a running maximum, and sums of ``exp(k_j - maximum) v_j`` and of ``exp(k_j - maximum)``.

A program walks through the tokens of one chunk for a block of channels; chunks run side by side. A pool is a row of 3 C
numbers in float32: maxima, numerators, denominators. Pointers and hidden tokens as in ``gpu/tiles.py``.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu import maps

FLOOR = tl.constexpr(maps.FLOOR)


@triton.jit
def numbers(pointer, columns, width):
    """Channels of one token in float32, zeros beyond the last."""
    return tl.load(pointer + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def is_visible(visible, t, HAS_MASK: tl.constexpr):
    """Whether token ``t`` may be shown."""
    if HAS_MASK:
        return tl.load(visible + t) != 0
    else:
        return t >= 0


@triton.jit
def key(K, V, kt, vt, t, columns, width, visible, HAS_MASK: tl.constexpr):
    """Key and value of a token and whether it may be shown; nothing of a hidden one is read."""
    shown = is_visible(visible, t, HAS_MASK)
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
    rest = pointer + 2 * width
    return numbers(pointer, columns, width), numbers(pointer + width, columns, width), numbers(rest, columns, width)


@triton.jit
def write_pool(pointer, columns, width, top, numerator, denominator):
    """The three parts of a pool."""
    inside = columns < width
    tl.store(pointer + columns, top, mask=inside)
    tl.store(pointer + width + columns, numerator, mask=inside)
    tl.store(pointer + 2 * width + columns, denominator, mask=inside)


@triton.jit
def position(width, chunks, BC: tl.constexpr):
    """Place of a program: its channels, chunk, sequence and head; numbers of tokens are 64 bits wide from here on."""
    program, parts = tl.program_id(0).to(tl.int64), tl.cdiv(width, BC)
    columns, at = (program % parts).to(tl.int32) * BC + tl.arange(0, BC), program // parts
    return columns, at % chunks, at // chunks


@triton.jit
def chunk_pools(
    K, V, VISIBLE, POOLS, heads, length, C, size, chunks, kb, kh, kt, vb, vh, vt, mb, mh,
    HAS_MASK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The pool of every chunk."""
    columns, chunk, n = position(C, chunks, BC)
    K, V = K + n // heads * kb + n % heads * kh, V + n // heads * vb + n % heads * vh
    VISIBLE += n // heads * mb + n % heads * mh
    top, numerator, denominator = no_keys(BC)
    for t in range(chunk * size, tl.minimum(chunk * size + size, length)):
        k, v, shown = key(K, V, kt, vt, t, columns, C, VISIBLE, HAS_MASK)
        top, numerator, denominator = add(top, numerator, denominator, k, v, shown)
    write_pool(POOLS + (n * chunks + chunk) * 3 * C, columns, C, top, numerator, denominator)


@triton.jit
def running_pools(
    POOLS, FIRST, LAST, BEGINS, C, chunks, HAS_FIRST: tl.constexpr, PACKED: tl.constexpr, BC: tl.constexpr
):
    """Every chunk's pool becomes that of FIRST and the chunks before it; LAST: all of them.

    PACKED: of the chunks of its own sequence; ``begins`` says which are a sequence's first.
    """
    columns, _, n = position(C, 1, BC)
    top, numerator, denominator = no_keys(BC)
    if HAS_FIRST:
        top, numerator, denominator = read_pool(FIRST + n * 3 * C, columns, C)
    for chunk in range(0, chunks):
        where = POOLS + (n * chunks + chunk) * 3 * C
        if PACKED:
            begins = tl.load(BEGINS + chunk) != 0
            top = tl.where(begins, FLOOR, top)
            numerator, denominator = tl.where(begins, 0.0, numerator), tl.where(begins, 0.0, denominator)
        other, other_numerator, other_denominator = read_pool(where, columns, C)
        write_pool(where, columns, C, top, numerator, denominator)
        top, numerator, denominator = joined(top, numerator, denominator, other, other_numerator, other_denominator)
    write_pool(LAST + n * 3 * C, columns, C, top, numerator, denominator)


@triton.jit
def write_outputs(
    OUT, REST, LOGS, where, inside, top, numerator, denominator, gate, LOGGED: tl.constexpr, ROUNDED: tl.constexpr
):
    """Means of values, times ``gate``; what rounding took of them, and the logarithms of denominators."""
    nothing = denominator == 0
    divisor = tl.where(nothing, 1.0, denominator)
    out = tl.where(nothing, 0.0, numerator / divisor) * gate
    tl.store(OUT + where, out.to(OUT.dtype.element_ty), mask=inside)
    if ROUNDED:
        rest = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        tl.store(REST + where, rest.to(OUT.dtype.element_ty), mask=inside)
    if LOGGED:
        tl.store(LOGS + where, tl.where(nothing, FLOOR, top + tl.log(divisor)), mask=inside)


@triton.jit
def outputs(
    Q, K, V, VISIBLE, POOLS, OUT, REST, LOGS, LAST, heads, length, C, size, chunks,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh,
    CAUSAL: tl.constexpr, GATED: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, LOGGED: tl.constexpr,
    ROUNDED: tl.constexpr, ENDS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``sigmoid(q_i)`` times numerators over denominators; what rounding took, and the logarithms of denominators.

    Not CAUSAL: all queries read one pool. ENDS: the pool after the tokens is written too.
    """
    columns, chunk, n = position(C, chunks, BC)
    inside = columns < C
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, VISIBLE = V + n // heads * vb + n % heads * vh, VISIBLE + n // heads * mb + n % heads * mh
    top, numerator, denominator = no_keys(BC)
    if HAS_FIRST:
        at = n * chunks + chunk if CAUSAL else n
        top, numerator, denominator = read_pool(POOLS + at * 3 * C, columns, C)
    for t in range(chunk * size, tl.minimum(chunk * size + size, length)):
        if CAUSAL:
            k, v, shown = key(K, V, kt, vt, t, columns, C, VISIBLE, HAS_MASK)
            top, numerator, denominator = add(top, numerator, denominator, k, v, shown)
        gate = tl.sigmoid(numbers(Q + t * qt, columns, C)) if GATED else 1.0
        where = (n * length + t) * C + columns
        write_outputs(OUT, REST, LOGS, where, inside, top, numerator, denominator, gate, LOGGED, ROUNDED)
    if ENDS:
        write_pool(LAST + n * 3 * C, columns, C, top, numerator, denominator)
