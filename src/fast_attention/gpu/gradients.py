"""Gradients of queries, keys and values, each block by its own program: no two write to one place.

``factors`` are one over the denominators, ``weights`` the denominators' gradients. States are what queries read (of
keys and values before a chunk) and what keys give (of queries and scaled gradients behind it). Products are made in
the order in which they are used, so that nothing that a product made is transposed.

Weights of pairs of exponentials are ``e^(b_j + g_i)``, g a query's logarithms over its denominator's; what keys give is
over the largest of the queries' ``e^g``, feature by feature.
"""

# pyright: reportGeneralTypeIssues=false
# Triton's functions raise wherever they are not compiled, and so seem never to return.

from __future__ import annotations

import triton
import triton.language as tl

from fast_attention.gpu.decays import after, between
from fast_attention.gpu.logarithms import (
    NOTHING,
    column,
    exceeds_range,
    first_seen,
    line,
    of_tokens,
    rows_of,
    tokens,
    turned_of_tokens,
    turned_tokens,
)
from fast_attention.gpu.tiles import (
    EXPONENTIAL,
    FLOOR,
    NONE,
    feature,
    load_mask,
    numbers,
    of_head,
    of_weights,
    place,
    row,
    slope,
    store_row,
    store_tile,
    tile,
    turned,
    whole_product,
)


@triton.jit
def query_pairs(
    GRAD, gt, first, length, factors, weights, V, vt, other, keys, VISIBLE, E,
    PRECISION: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights of a block of queries for one of keys, (queries, keys); zeros where these come later."""
    pairs = tl.zeros((BT, BT), tl.float32)
    for e in range(0, E, BE):
        grad = tile(GRAD, gt, first, length, e, E, None, 0.0, NONE, BT, BE)
        v = turned(V, vt, other, keys, e, E, VISIBLE, 0.0, NONE, BT, BE)
        pairs = tl.dot(grad, v, pairs, input_precision=PRECISION)
    later = other + tl.arange(0, BT)[None, :] > first + tl.arange(0, BT)[:, None]
    return tl.where(later, 0.0, pairs * factors + weights)


@triton.jit
def key_pairs(
    GRAD, gt, other, length, FACTORS, WEIGHTS, V, vt, first, keys, VISIBLE, E,
    PRECISION: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The gradients of pairs as (keys, queries), for a block of keys and one of queries; zeros where these come
    earlier.
    """
    pairs = tl.zeros((BT, BT), tl.float32)
    for e in range(0, E, BE):
        v = tile(V, vt, first, keys, e, E, VISIBLE, 0.0, NONE, BT, BE)
        grad = turned(GRAD, gt, other, length, e, E, None, 0.0, NONE, BT, BE)
        pairs = tl.dot(v, grad, pairs, input_precision=PRECISION)
    earlier = other + tl.arange(0, BT)[None, :] < first + tl.arange(0, BT)[:, None]
    pairs = pairs * row(FACTORS, other, length, BT)[None, :] + row(WEIGHTS, other, length, BT)[None, :]
    return tl.where(earlier, 0.0, pairs)


@triton.jit
def through_state(
    X, xt, first, length, VISIBLE, STATES, d, D, E,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Products of gradients, or of values, with a state."""
    total = tl.zeros((BT, BD), tl.float32)
    for e in range(0, E, BE):
        x = tile(X, xt, first, length, e, E, VISIBLE, 0.0, NONE, BT, BE)
        total = whole_product(x, turned(STATES, E, d, D, e, E, None, 0.0, NONE, BD, BE), total, PRECISION)
    return total


@triton.jit
def through_keys(z, b, pairs, early, far, PRECISION: tl.constexpr, BT: tl.constexpr):
    """The gradients of queries' logarithms z that a block of keys with logarithms b gives."""
    if far:
        rows, dz = tl.arange(0, BT), tl.zeros(z.shape, tl.float32)
        for j in range(0, BT):
            terms = tl.where((rows >= j)[:, None], z + line(b, j, BT)[None, :], NOTHING)
            dz += column(pairs, j, BT)[:, None] * tl.exp(terms)
    else:
        top = tl.maximum(tl.max(b, 0), FLOOR)[None, :]
        read = tl.dot(pairs, tl.exp(b - top), input_precision=PRECISION)
        dz = tl.exp(tl.where(early[:, None], NOTHING, z + top)) * read
    return dz


@triton.jit
def through_queries(b, g, pairs, far, PRECISION: tl.constexpr, BT: tl.constexpr):
    """The gradients of keys' logarithms b that a block of queries with logarithms g gives."""
    if far:
        rows, db = tl.arange(0, BT), tl.zeros(b.shape, tl.float32)
        for i in range(0, BT):
            terms = tl.where((rows <= i)[:, None], b + line(g, i, BT)[None, :], NOTHING)
            db += column(pairs, i, BT)[:, None] * tl.exp(terms)
    else:
        top = tl.maximum(tl.max(g, 0), FLOOR)[None, :]
        db = tl.exp(b + top) * tl.dot(pairs, tl.exp(g - top), input_precision=PRECISION)
    return db


@triton.jit
def of_queries(
    Q, K, V, QROWS, KROWS, BIAS, VISIBLE, SINCE, LOGS, STATES, GRAD, FACTORS, WEIGHTS, SHIFTS, OUT, OF_LOGS,
    heads, length, keys, D, width, E, chunks, low, offset, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``(dn_i S^T + w_i z + sum_j (dn_i . v_j + w_i) phi(k_j)) phi'(q_i)``, dn the scaled gradients, w the weights.

    EXPONENTIAL: gradients of the logarithms, all of a block by one program, which adds up what they give its queries.
    OF_LOGS: gradients of logarithms, of features that are trained or of decays.
    """
    n, first, start = place(length, 1 if MAP == EXPONENTIAL else D, BT, 1 if MAP == EXPONENTIAL else BD)
    chunk = first // CHUNK if CAUSAL else 0
    Q, K, V = of_head(Q, n, heads, qb, qh), of_head(K, n, heads, kb, kh), of_head(V, n, heads, vb, vh)
    GRAD, VISIBLE = of_head(GRAD, n, heads, gb, gh), of_head(VISIBLE, n, heads, mb, mh)
    QROWS, KROWS = of_weights(QROWS, n, heads, D, width), of_weights(KROWS, n, heads, D, width)
    STATES, BIAS = STATES + (n * chunks + chunk) * numbers(D, E, MAP == EXPONENTIAL), of_weights(BIAS, n, heads, D, 1)
    factors = row(FACTORS + n * length, first, length, BT)[:, None]
    weights = row(WEIGHTS + n * length, first, length, BT)[:, None]
    if MAP == EXPONENTIAL:
        x = tokens(Q, qt, first, length, width, None, BT, BW)
        shifts = row(SHIFTS + n * length, first, length, BT)[:, None]
        dx, rows = tl.zeros((BT, BW), tl.float32), tl.arange(0, BT)
        for d in range(0, D, BD):
            z = of_tokens(x, QROWS, BIAS, d, D, width, low, offset, FLOOR, False, BD, BW) - shifts
            z = tl.where(factors != 0, z, FLOOR)
            dz = through_state(GRAD, gt, first, length, None, STATES, d, D, E, PRECISION, BT, BD, BE) * factors
            dz += weights * row(STATES + D * E, d, D, BD)[None, :]
            dz *= tl.exp(z + row(STATES + D * E + D, d, D, BD)[None, :])
            if CAUSAL:
                for other in range(chunk * CHUNK, first + BT, BT):
                    pairs = query_pairs(
                        GRAD, gt, first, length, factors, weights, V, vt, other, keys, VISIBLE, E, PRECISION, BT, BE
                    )
                    y = tokens(K, kt, other, keys, width, VISIBLE, BT, BW)
                    is_visible = load_mask(VISIBLE, other, keys, BT)[:, None]
                    early = other + first_seen(VISIBLE, other, keys, BT) > first + rows
                    b = of_tokens(y, KROWS, BIAS, d, D, width, low, offset, 0.0, True, BD, BW)
                    far = exceeds_range(b, is_visible, 0) & (other == first)
                    dz += through_keys(z, tl.where(is_visible, b, NOTHING), pairs, early, far, PRECISION, BT)
            dx = tl.dot(dz, rows_of(QROWS, d, D, width, low, BD, BW), dx, input_precision=PRECISION)
            if OF_LOGS is not None:
                store_tile(OF_LOGS + n * length * D, D, first, length, d, D, dz, BT, BD)
        store_tile(OUT + n * length * width, width, first, length, 0, width, dx * offset, BT, BW)
    else:
        total = through_state(GRAD, gt, first, length, None, STATES, start, D, E, PRECISION, BT, BD, BE)
        total = total * factors + weights * row(STATES + D * E, start, D, BD)[None, :]
        if LOGS is not None:
            total *= row(SINCE + n * length, first, length, BT)[:, None]
        if CAUSAL:
            for other in range(chunk * CHUNK, first + BT, BT):
                pairs = query_pairs(
                    GRAD, gt, first, length, factors, weights, V, vt, other, keys, VISIBLE, E, PRECISION, BT, BE
                )
                if LOGS is not None:
                    pairs *= between(LOGS + n * length, low, first, other, length, BT)
                k = tile(K, kt, other, keys, start, D, VISIBLE, offset, MAP, BT, BD)
                total = tl.dot(pairs, k, total, input_precision=PRECISION)
        q = tile(Q, qt, first, length, start, D, None, 0.0, NONE, BT, BD)
        if OF_LOGS is not None:  # every program of columns writes a row of its own
            of_logs = OF_LOGS + (n * tl.cdiv(D, BD) + start // BD) * length
            store_row(of_logs, first, length, total * feature(q, offset, MAP), BT)
        store_tile(OUT + n * length * D, D, first, length, start, D, total * slope(q, MAP), BT, BD)


@triton.jit
def of_keys(
    Q, K, V, QROWS, KROWS, BIAS, VISIBLE, UNTIL, LOGS, STATES, GRAD, FACTORS, WEIGHTS, SHIFTS, OUT, OF_LOGS,
    heads, length, keys, D, width, E, chunks, low, offset, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``(v_j R^T + r + sum_i (v_j . dn_i + w_i) phi(q_i)) phi'(k_j)``, R and r sums over queries behind the chunk."""
    n, first, start = place(keys, 1 if MAP == EXPONENTIAL else D, BT, 1 if MAP == EXPONENTIAL else BD)
    chunk = first // CHUNK if CAUSAL else 0
    Q, K, V = of_head(Q, n, heads, qb, qh), of_head(K, n, heads, kb, kh), of_head(V, n, heads, vb, vh)
    GRAD, VISIBLE = of_head(GRAD, n, heads, gb, gh), of_head(VISIBLE, n, heads, mb, mh)
    QROWS, KROWS = of_weights(QROWS, n, heads, D, width), of_weights(KROWS, n, heads, D, width)
    STATES, BIAS = STATES + (n * chunks + chunk) * numbers(D, E, MAP == EXPONENTIAL), of_weights(BIAS, n, heads, D, 1)
    if MAP == EXPONENTIAL:
        is_visible = load_mask(VISIBLE, first, keys, BT)[:, None]
        x = tokens(K, kt, first, keys, width, VISIBLE, BT, BW)
        dx, squares, rows = tl.zeros((BT, BW), tl.float32), tl.zeros((BT,), tl.float32), tl.arange(0, BT)
        for d in range(0, D, BD):
            b = of_tokens(x, KROWS, BIAS, d, D, width, low, offset, 0.0, True, BD, BW)
            far = exceeds_range(b, is_visible, 0)
            b = tl.where(is_visible, b, NOTHING)
            db = through_state(V, vt, first, keys, VISIBLE, STATES, d, D, E, PRECISION, BT, BD, BE)
            db += row(STATES + D * E, d, D, BD)[None, :]
            db *= tl.exp(b + row(STATES + D * E + D, d, D, BD)[None, :])
            if CAUSAL:
                for other in range(first, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
                    factors = row(FACTORS + n * length, other, length, BT)
                    pairs = key_pairs(
                        GRAD, gt, other, length, FACTORS + n * length, WEIGHTS + n * length, V, vt, first, keys,
                        VISIBLE, E, PRECISION, BT, BE,
                    )  # fmt: skip
                    y = tokens(Q, qt, other, length, width, None, BT, BW)
                    g = of_tokens(y, QROWS, BIAS, d, D, width, low, offset, FLOOR, False, BD, BW)
                    g -= row(SHIFTS + n * length, other, length, BT)[:, None]
                    attends = (factors != 0) & (other + rows >= first + first_seen(VISIBLE, first, keys, BT))
                    g = tl.where(attends[:, None], g, NOTHING)
                    db += through_queries(b, g, pairs, far & (other == first), PRECISION, BT)
            db = tl.where((d + tl.arange(0, BD) < D)[None, :], db, 0.0)
            dx = tl.dot(db, rows_of(KROWS, d, D, width, low, BD, BW), dx, input_precision=PRECISION)
            squares += tl.sum(db, 1)
            if OF_LOGS is not None:
                store_tile(OF_LOGS + n * keys * D, D, first, keys, d, D, db, BT, BD)
        dx = (dx - x.to(tl.float32) * (squares * offset)[:, None]) * offset
        store_tile(OUT + n * keys * width, width, first, keys, 0, width, dx, BT, BW)
    else:
        total = through_state(V, vt, first, keys, VISIBLE, STATES, start, D, E, PRECISION, BT, BD, BE)
        total += row(STATES + D * E, start, D, BD)[None, :]
        if LOGS is not None:
            total *= row(UNTIL + n * keys, first, keys, BT)[:, None]
        if CAUSAL:
            for other in range(first, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
                pairs = key_pairs(
                    GRAD, gt, other, length, FACTORS + n * length, WEIGHTS + n * length, V, vt, first, keys, VISIBLE, E,
                    PRECISION, BT, BE,
                )  # fmt: skip
                if LOGS is not None:
                    pairs *= after(LOGS + n * length, low, first, other, length, BT)
                q = tile(Q, qt, other, length, start, D, None, offset, MAP, BT, BD)
                total = tl.dot(pairs, q, total, input_precision=PRECISION)
        k = tile(K, kt, first, keys, start, D, VISIBLE, 0.0, NONE, BT, BD)
        total = tl.where(load_mask(VISIBLE, first, keys, BT)[:, None], total, 0.0)
        if OF_LOGS is not None:
            of_logs = OF_LOGS + (n * tl.cdiv(D, BD) + start // BD) * keys
            store_row(of_logs, first, keys, total * feature(k, offset, MAP), BT)
        store_tile(OUT + n * keys * D, D, first, keys, start, D, total * slope(k, MAP), BT, BD)


@triton.jit
def add_pairs(pairs, b, g, far, PRECISION: tl.constexpr, BT: tl.constexpr):
    """Add the weights of a block of keys for one of queries, logarithms b (BT, D) and g (D, BT), (keys, queries)."""
    if far:
        rows = tl.arange(0, BT)
        for i in range(0, BT):
            terms = tl.where((rows <= i)[:, None], b + column(g, i, BT)[None, :], NOTHING)
            pairs += tl.where((rows == i)[None, :], tl.sum(tl.exp(terms), 1)[:, None], 0.0)
    else:
        top = tl.maximum(tl.max(g, 1), FLOOR)
        pairs = tl.dot(tl.exp(b + top[None, :]), tl.exp(g - top[:, None]), pairs, input_precision=PRECISION)
    return pairs


@triton.jit
def of_values(
    Q, K, V, QROWS, KROWS, BIAS, VISIBLE, UNTIL, LOGS, STATES, GRAD, FACTORS, SHIFTS, OUT,
    heads, length, keys, D, width, E, chunks, low, offset, qb, qh, qt, kb, kh, kt, vb, vh, vt, mb, mh, gb, gh, gt,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """``phi(k_j) R + sum_i (phi(k_j) . phi(q_i)) dn_i``: what keys give, and the pairs inside the chunk."""
    n, first, e = place(keys, E, BT, BE)
    chunk, rows = first // CHUNK if CAUSAL else 0, tl.arange(0, BT)
    Q, K, GRAD = of_head(Q, n, heads, qb, qh), of_head(K, n, heads, kb, kh), of_head(GRAD, n, heads, gb, gh)
    VISIBLE, BIAS = of_head(VISIBLE, n, heads, mb, mh), of_weights(BIAS, n, heads, D, 1)
    QROWS, KROWS = of_weights(QROWS, n, heads, D, width), of_weights(KROWS, n, heads, D, width)
    STATES += (n * chunks + chunk) * numbers(D, E, MAP == EXPONENTIAL)
    total = tl.zeros((BT, BE), tl.float32)
    if MAP == EXPONENTIAL:
        x = tokens(K, kt, first, keys, width, VISIBLE, BT, BW)
        is_visible = load_mask(VISIBLE, first, keys, BT)[:, None]
    for d in range(0, D, BD):
        if MAP == EXPONENTIAL:
            b = of_tokens(x, KROWS, BIAS, d, D, width, low, offset, 0.0, True, BD, BW)
            features = tl.exp(tl.where(is_visible, b + row(STATES + D * E + D, d, D, BD)[None, :], NOTHING))
        else:
            features = tile(K, kt, first, keys, d, D, VISIBLE, offset, MAP, BT, BD)
        state = tile(STATES, E, d, D, e, E, None, 0.0, NONE, BD, BE)
        total = tl.dot(features, state, total, input_precision=PRECISION)
    if LOGS is not None:
        total *= row(UNTIL + n * keys, first, keys, BT)[:, None]
    if CAUSAL:
        for other in range(first, tl.minimum(chunk * CHUNK + CHUNK, length), BT):
            pairs = tl.zeros((BT, BT), tl.float32)
            if MAP == EXPONENTIAL:
                y = turned_tokens(Q, qt, other, length, width, None, BT, BW)
                attends = other + rows >= first + first_seen(VISIBLE, first, keys, BT)
                attends = attends & (row(FACTORS + n * length, other, length, BT) != 0)
            for d in range(0, D, BD):
                if MAP == EXPONENTIAL:
                    b = of_tokens(x, KROWS, BIAS, d, D, width, low, offset, 0.0, True, BD, BW)
                    far = exceeds_range(b, is_visible, 0) & (other == first)
                    b = tl.where(is_visible, b, NOTHING)
                    g = turned_of_tokens(y, QROWS, BIAS, d, D, width, low, offset, FLOOR, False, BD, BW)
                    g -= row(SHIFTS + n * length, other, length, BT)[None, :]
                    pairs = add_pairs(pairs, b, tl.where(attends[None, :], g, NOTHING), far, PRECISION, BT)
                else:
                    k = tile(K, kt, first, keys, d, D, VISIBLE, offset, MAP, BT, BD)
                    q = turned(Q, qt, other, length, d, D, None, offset, MAP, BT, BD)
                    pairs = tl.dot(k, q, pairs, input_precision=PRECISION)
            if LOGS is not None:
                pairs *= after(LOGS + n * length, low, first, other, length, BT)
            pairs = tl.where(other + rows[None, :] < first + rows[:, None], 0.0, pairs)
            factors = row(FACTORS + n * length, other, length, BT)[:, None]
            grad = tile(GRAD, gt, other, length, e, E, None, 0.0, NONE, BT, BE) * factors
            total = tl.dot(pairs, grad, total, input_precision=PRECISION)
    store_tile(OUT + n * keys * E, E, first, keys, e, E, total, BT, BE)
