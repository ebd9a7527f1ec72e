"""Sums over keys of values, of scores times values, and of scores; what queries read of them.

A program walks through the tokens of one chunk for a block of channels, a tile at a time; chunks run side by side. Sums
are a row of 4 C numbers in float32: ``sum v_j``, ``sum k_j v_j``, ``sum k_j`` and, in every channel, the number of
visible keys; between chunks ``gpu/sums.py`` adds them up. Pointers and hidden tokens as in ``gpu/tiles.py``.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.pooling.kernels import numbers, position
from fast_attention.gpu.summing import plain as forms

SCORES, COUNT, TINY = tl.constexpr(forms.SCORES), tl.constexpr(forms.COUNT), tl.constexpr(forms.TINY)


@triton.jit
def tile(pointer, t, xt, columns, STEP: tl.constexpr, read):
    """Channels of some tokens in float32, zeros where ``read`` forbids; STEP 0: one number serves all channels."""
    return tl.load(pointer + t[:, None] * xt + columns[None, :] * STEP, mask=read, other=0.0).to(tl.float32)


@triton.jit
def keys(
    K, V, VISIBLE, kt, vt, t, length, columns, C, K_STEP: tl.constexpr, HAS_MASK: tl.constexpr
):  # fmt: skip
    """Scores and values of some tokens, and which of them may be shown; nothing of a hidden one is read."""
    shown = t < length
    if HAS_MASK:
        shown = tl.load(VISIBLE + t, mask=shown, other=0) != 0
    read = shown[:, None] & (columns < C)[None, :]
    return tile(K, t, kt, columns, K_STEP, read), tile(V, t, vt, columns, 1, read), shown


@triton.jit
def no_keys(BC: tl.constexpr):
    """The sums before the first key."""
    nothing = tl.zeros((BC,), tl.float32)
    return nothing, nothing, nothing, nothing


@triton.jit
def add(values, weighted, scores, count, k, v, shown):
    """Sums and those over a tile of keys."""
    number = count + tl.sum(shown.to(tl.float32), 0)
    return values + tl.sum(v, 0), weighted + tl.sum(k * v, 0), scores + tl.sum(k, 0), number


@triton.jit
def up_to_each(values, weighted, scores, count, k, v, shown):
    """Sums up to every token of a tile, those before the tile included."""
    number = count[None, :] + tl.cumsum(shown.to(tl.float32), 0)[:, None]
    weighted = weighted[None, :] + tl.cumsum(k * v, 0)
    return values[None, :] + tl.cumsum(v, 0), weighted, scores[None, :] + tl.cumsum(k, 0), number


@triton.jit
def read_sums(pointer, columns, width):
    """The first three parts of a row of sums, or of their gradients."""
    scores = numbers(pointer + 2 * width, columns, width)
    return numbers(pointer, columns, width), numbers(pointer + width, columns, width), scores


@triton.jit
def write_sums(pointer, columns, width, values, weighted, scores):
    """The first three parts of a row of sums, or of their gradients."""
    inside = columns < width
    tl.store(pointer + columns, values, mask=inside)
    tl.store(pointer + width + columns, weighted, mask=inside)
    tl.store(pointer + 2 * width + columns, scores, mask=inside)


@triton.jit
def divisors(q, scores, count, DIVISOR: tl.constexpr):
    """What numerators are divided by; infinite where a sum of scores vanishes, so that quotients are zeros."""
    if DIVISOR == SCORES:
        total = count * q + scores
        return tl.where(total > TINY, total, float("inf"))
    elif DIVISOR == COUNT:
        return tl.maximum(count, 1.0)
    else:
        return tl.full((1, 1), 1.0, tl.float32)


@triton.jit
def chunk_sums(
    K, V, VISIBLE, SUMS, heads, length, C, size, chunks, kb, kh, kt, vb, vh, vt, mb, mh,
    K_STEP: tl.constexpr, HAS_MASK: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The sums of every chunk."""
    columns, chunk, n = position(C, chunks, BC)
    K, V = K + n // heads * kb + n % heads * kh, V + n // heads * vb + n % heads * vh
    VISIBLE += n // heads * mb + n % heads * mh
    values, weighted, scores, count = no_keys(BC)
    for start in range(chunk * size, tl.minimum(chunk * size + size, length), BT):
        t = start + tl.arange(0, BT)
        k, v, shown = keys(K, V, VISIBLE, kt, vt, t, length, columns, C, K_STEP, HAS_MASK)
        values, weighted, scores, count = add(values, weighted, scores, count, k, v, shown)
    where = SUMS + (n * chunks + chunk) * 4 * C
    write_sums(where, columns, C, values, weighted, scores)
    tl.store(where + 3 * C + columns, count, mask=columns < C)


@triton.jit
def outputs(
    Q, K, V, VISIBLE, SUMS, OUT, LAST, heads, length, C, size, chunks, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh,
    CAUSAL: tl.constexpr, DIVISOR: tl.constexpr, HAS_FIRST: tl.constexpr, ENDS: tl.constexpr, Q_STEP: tl.constexpr,
    K_STEP: tl.constexpr, HAS_MASK: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``(q_i sum v_j + sum k_j v_j) / divisor``. Not CAUSAL: of one row of sums. ENDS: sums after the tokens too."""
    columns, chunk, n = position(C, chunks, BC)
    Q, K = Q + n // heads * qb + n % heads * qh, K + n // heads * kb + n % heads * kh
    V, VISIBLE = V + n // heads * vb + n % heads * vh, VISIBLE + n // heads * mb + n % heads * mh
    values, weighted, scores, count = no_keys(BC)
    if HAS_FIRST:
        before = SUMS + (n * chunks + chunk if CAUSAL else n) * 4 * C
        values, weighted, scores = read_sums(before, columns, C)
        count = numbers(before + 3 * C, columns, C)
    for start in range(chunk * size, tl.minimum(chunk * size + size, length), BT):
        t = start + tl.arange(0, BT)
        inside = (t < length)[:, None] & (columns < C)[None, :]
        q = tile(Q, t, qt, columns, Q_STEP, inside)
        if CAUSAL:
            k, v, shown = keys(K, V, VISIBLE, kt, vt, t, length, columns, C, K_STEP, HAS_MASK)
            s0, s1, b, number = up_to_each(values, weighted, scores, count, k, v, shown)
            values, weighted, scores, count = add(values, weighted, scores, count, k, v, shown)
        else:
            s0, s1, b, number = values[None, :], weighted[None, :], scores[None, :], count[None, :]
        out = (q * s0 + s1) / divisors(q, b, number, DIVISOR)
        where = (n * length + t)[:, None] * C + columns[None, :]
        tl.store(OUT + where, out.to(OUT.dtype.element_ty), mask=inside)
    if ENDS:
        write_sums(LAST + n * 4 * C, columns, C, values, weighted, scores)
        tl.store(LAST + n * 4 * C + 3 * C + columns, count, mask=columns < C)
