"""Kernelised attention from features, plain and differentiable: two products of matrices; causal, in chunks.

Features are values times exponentials: ``q_ic e^(a_ic)`` of queries and ``k_jc e^(b_jc)`` of keys, with one
logarithm for each token or one for each feature. With B_ic the largest b_jc among the keys that query i sees, its sums
are divided by e to the power of ``max_c (a_ic + B_ic)``: the largest term is one, and no key moves a query before it.

Sums that decay are of this kind: ``a`` is the sum of the logarithms of decays up to a token, and ``b = -a``, both in
float64, where millions of tokens lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks, numerics
from fast_attention.engine.blocks import join, smaller, split
from fast_attention.engine.heads import short
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.tracing import symbolic, traced
from fast_attention.feature_maps.feature_map import Features, Logs
from fast_attention.mechanisms.linear.linear_state import (
    Factors,
    Kind,
    LinearState,
    Sums,
    empty,
    factors,
    largest_is_one,
    normalise,
    prefixes,
    read,
    scaled,
    summarise,
    times,
)

Mapped = TypeVar("Mapped", Features, Logs, Features | Logs)
CHUNK = 128  # tokens per chunk of the causal form
SHORT = 256  # tokens of which all pairs are one product where they have as many features at least
HALVES = 64  # tokens of a chunk whose pairs are taken by halves
SLACK = 40.0  # how far above its log scale a feature may be: sums of e^40 and their gradients are numbers in float32


def log_scale(keys: Features) -> Tensor:
    """The logarithm (..., 1) by which sums of these keys and many more do not overflow; 0 for ordinary ones."""
    return -numerics.factor(keys.values.flatten(-2), 2.0**20, rows=True).log()


def attention(
    queries: Features | Logs, keys: Features | Logs, v: Tensor, state: LinearState | None = None,
    log_decay: Tensor | None = None, *, is_causal: bool = True, eps: float, normalize: bool = True,
) -> tuple[Tensor, LinearState | None]:  # fmt: skip
    """Outputs (..., L, Ev) and, behind a ``state``, the state after the tokens.

    Keys that have scales need no ``eps`` and get none; others are brought to where no sum overflows. ``log_decay``
    (..., L, 1), or (..., L, C) for every feature, are the logarithms of decays of causal sums.
    """
    if isinstance(keys, Logs) or isinstance(queries, Logs) or keys.log_scale is not None:
        sums, after = attend_behind(queries.free, keys, v, state, is_causal=is_causal)
        return normalise(sums), after
    largest, smaller = log_scale(keys), None
    if state is None:
        v = v * (smaller := numerics.factor(v, 2.0**28))
    else:
        largest = torch.maximum(state.log_scale, largest)
        rescale = (state.log_scale - largest).exp()
        state = LinearState(state.kv * rescale[..., None], state.k * rescale, largest)
    factor, row = (-largest).exp(), numerics.factor(queries.values, 1.0, rows=True)
    q, k, reached = queries.values * row, keys.values * factor[..., None], None
    if log_decay is None:
        sums, after = attend_behind(q, k, v, state, is_causal=is_causal)
    else:
        reached = log_decay.double().cumsum(-2)
        state = None if state is None else state._replace(log_scale=torch.zeros_like(reached[..., 0, :]))
        sums, after = attend_behind(Factors(q, reached), Factors(k, -reached), v, state, is_causal=is_causal)
        if after is not None:  # the factor of one has the gradient that the log scale of a state leaves out
            unit = (reached - reached.detach())[..., -1, :].exp().to(v.dtype)
            after = LinearState(after.kv * unit[..., None], after.k * unit, largest)
    scale = factor * row[..., 0]
    if normalize:
        out = normalise(Sums(sums.numerator, sums.denominator + eps * scale))
    else:
        out = sums.numerator / scale[..., None]
    return out if smaller is None else out / smaller, after


def attend_behind(
    q: Kind, keys: Kind, v: Tensor, state: LinearState | None, *, is_causal: bool
) -> tuple[Sums, LinearState | None]:
    """Sums of queries over the keys, behind a ``state`` over those before too, with the state after the tokens."""
    return (attend(q, keys, v, is_causal=is_causal), None) if state is None else advance(q, keys, v, state)


def summarised(keys: Features | Logs, v: Tensor) -> LinearState:
    """The state after keys and values."""
    if isinstance(keys, Logs) or keys.log_scale is not None:
        return summarise(keys, v)
    largest = log_scale(keys)
    return summarise(Features(keys.values * (-largest).exp()[..., None]), v)._replace(log_scale=largest)


def attend(q: Kind, keys: Kind, v: Tensor, *, is_causal: bool, chunk: int | None = None) -> Sums:
    """Sums of all queries; causal ones aligned to the bottom right where there are more or fewer queries than keys."""
    q, keys = factors(q), factors(keys)
    if not is_causal:
        return _pairs(q, keys, v) if short(q.shown, v) else read(q, summarise(keys, v))
    length, extra = v.shape[-2], v.shape[-2] - q.shown.shape[-2]
    if chunk is None:
        few = not traced() and q.values is not None and length <= min(q.values.shape[-1], SHORT)
        chunk = length if few else CHUNK
    if extra == 0:
        return _advance(q, keys, v, None, chunk=chunk)[0]
    if extra > 0:  # every query sees the first keys
        first, rest = keys.some(slice(0, extra)), keys.some(slice(extra, None))
        return advance(q, rest, v[..., extra:, :], summarise(first, v[..., :extra, :]), chunk=chunk)[0]
    sums = _advance(q.some(slice(-extra, None)), keys, v, None, chunk=chunk)[0]
    return Sums(F.pad(sums.numerator, (0, 0, -extra, 0)), F.pad(sums.denominator, (-extra, 0)))


def _pairs(q: Factors, keys: Factors, v: Tensor) -> Sums:
    """``read(q, summarise(keys, v))`` of sequences so short that a state for each weighs more than all their pairs."""
    k, log_scale = scaled(keys)
    pairs = largest_is_one(q, log_scale[..., None, :]) @ k.mT
    return Sums(pairs @ v, pairs.sum(-1))


def advance(
    q: Kind, keys: Kind, v: Tensor, state: LinearState | None = None, *, chunk: int = CHUNK
) -> tuple[Sums, LinearState]:
    """Causal sums over new tokens behind ``state``, and the state after them; queries are free of a common factor.

    A masked product inside each chunk, the prefix of the chunks' states across them. Time O(n C (chunk + Ev)), memory
    O(n C Ev / chunk + n chunk); the result does not depend on ``chunk``.
    """
    q, keys = factors(q), factors(keys)
    if state is not None and not symbolic() and v.shape[-2] == 1:
        return step(q, keys, v, state)
    sums, after = _advance(q, keys, v, empty(keys, v) if state is None else state, chunk=chunk)
    assert after is not None
    return sums, after


def _advance(
    q: Factors, keys: Factors, v: Tensor, state: LinearState | None, *, chunk: int
) -> tuple[Sums, LinearState | None]:
    """``advance``; tokens that nothing precedes and that are one chunk leave no state."""
    length, each = v.shape[-2], keys.logs is not None and keys.logs.shape[-1] > 1  # a logarithm for each feature
    chunk = smaller(chunk, length)
    if state is None and not traced() and length <= chunk and (sums := _in_one_scale(q, keys, v)) is not None:
        return sums, None
    b, log_scales = _scaled_chunks(keys, state, chunk)
    rising = each and (traced() or q.values is not None or _rises(b, log_scales))
    if rising:
        chunk = 1 << (smaller(min(chunk, HALVES), length) - 1).bit_length()
        b, log_scales = _scaled_chunks(keys, state, chunk)
    alone = state is None and not traced() and length <= chunk
    queries, k, a = (None if x is None else split(x, chunk) for x in (q.values, keys.values, q.logs))
    values = split(v, chunk)
    if b is None or log_scales is None:
        assert queries is not None
        assert k is not None
        pairs = (queries @ k.mT).masked_fill(_later(chunk, v), 0.0)
    else:
        before = log_scales[..., :-1, None, :]
        if each and not rising:
            seen = torch.maximum(b.detach()[..., :1, :], before)
            queries = largest_is_one(Factors(None, a), seen)
            pairs = (queries @ (b - seen).exp_().mT).tril()
            from_before = before - seen
        else:
            seen = torch.maximum(cummax(b.detach()), before)
            a = -seen if a is None else a
            top = (a.detach() + seen).amax(-1, keepdim=True)
            pairs = (_pairs_by_halves if each else _pairs_by_scales)(a, b, top, queries, k)
            from_before = a + before - top
        if not alone:
            queries = times(queries, from_before.exp_())
            k = times(k, (b - log_scales[..., 1:, None, :]).exp_())
    numerator, denominator, after = pairs @ values, pairs.sum(-1, keepdim=True), None
    if not alone:
        assert queries is not None
        assert k is not None
        first = empty(keys, v) if state is None else state
        kv, z = prefixes(first, k.mT @ values, k.sum(-2), log_scales)
        numerator = numerator + queries @ kv[..., :-1, :, :]
        denominator = denominator + queries @ z[..., :-1, :, None]
        log_scale = first.log_scale if log_scales is None else log_scales[..., -1, :]
        after = LinearState(kv[..., -1, :, :], z[..., -1, :], log_scale)
    return Sums(join(numerator, length), join(denominator, length)[..., 0]), after


def _in_one_scale(q: Factors, keys: Factors, v: Tensor) -> Sums | None:
    """Sums of a sequence that is one chunk of logarithms, in the scale of its first key; None where others rise far
    above it.
    """
    if q.logs is None or q.values is not None or keys.logs is None:
        return None
    scale = keys.logs.detach()[..., :1, :].clamp_min(FLOOR)
    if bool((keys.logs.detach().amax(-2, keepdim=True) - scale > SLACK).any()):
        return None
    pairs = (largest_is_one(q, scale) @ (keys.logs - scale).exp_().mT).tril()
    return Sums(pairs @ v, pairs.sum(-1))


def _scaled_chunks(keys: Factors, state: LinearState | None, chunk: int) -> tuple[Tensor | None, Tensor | None]:
    """Logarithms of keys in chunks, and the largest before chunk 0, up to chunk 0, and so on."""
    if keys.logs is None:
        return None, None
    first = torch.full_like(keys.logs[..., 0, :], FLOOR) if state is None else state.log_scale
    b = split(keys.logs, chunk, value=float("-inf"))
    return b, cummax(torch.cat([first[..., None, :], b.detach().amax(-2)], -2))


def _rises(b: Any, log_scales: Any) -> bool:
    """Whether keys are so far above what the first query of a chunk sees that pairs are no product in that scale."""
    seen = torch.maximum(log_scales[..., :-1, :], b.detach()[..., 0, :])
    return bool((log_scales[..., 1:, :] - seen > SLACK).any())


def _pairs_by_scales(a: Tensor, b: Tensor, top: Tensor, q: Any, k: Any) -> Tensor:
    """``q_i . k_j exp(a_i + b_j - top_i)`` for j <= i, else 0, with a factor for each pair.

    One for a whole chunk would do harm: a far larger key late in it would make those before it vanish, for the queries
    in between as well.
    """
    return times(q @ k.mT, (a - top + b.mT).masked_fill(_later(a.shape[-2], a), float("-inf")).exp_())


def _pairs_by_halves(a: Tensor, b: Tensor, top: Tensor, q: Tensor | None, k: Tensor | None) -> Tensor:
    """``sum_c q_ic k_jc exp(a_ic + b_jc - top_i)`` for j <= i, else 0, for a power of two of tokens; None: ones.

    The second half of the queries sees the whole first half of the keys: in the scale of its largest b_jc their pairs
    are a product, and no exponent is above zero where ``a_ic + b_jc <= top_i`` for j <= i. Triangles fall into such
    squares by halving, down to single tokens. All have as many axes; a, b and ``top`` may be of higher precision than
    q and k. Halves
    come before all axes, or a product over chunks left open would be one over a multiple of them.
    """
    half = a.shape[-2] // 2
    if half == 0:
        return times(q, times(k, (a + b - top).exp())).sum(-1, keepdim=True)
    halves: Any = [None if x is None else x.unflatten(-2, (2, half)).movedim(-3, 0) for x in (a, b, top, q, k)]
    first, second = _pairs_by_halves(*halves)
    a, b, top = halves[0][1], halves[1][0], halves[2][1]
    q, k = (None if x is None else x[late] for x, late in zip(halves[3:], (1, 0), strict=True))
    largest = b.detach().amax(-2, keepdim=True).clamp_min(FLOOR)
    square = times(q, (a + largest - top).exp()) @ times(k, (b - largest).exp()).mT
    upper = torch.cat([first, torch.zeros_like(first)], -1)
    return torch.cat([upper, torch.cat([square, second], -1)], -2)


def step(q: Kind, keys: Kind, v: Tensor, state: LinearState) -> tuple[Sums, LinearState]:
    """``advance`` by one token: one pass over the state rescales it and adds to it, another reads it."""
    values, logs = (None if x is None else x[..., 0, :] for x in factors(keys))
    if logs is None:
        assert values is not None
        after = LinearState(state.kv + values[..., None] * v, state.k + values, state.log_scale)
        return read(q, after), after
    log_scale = torch.maximum(state.log_scale, logs.detach())
    rescale, values = (state.log_scale - log_scale).exp().to(v.dtype), times(values, (logs - log_scale).exp())
    kv = values[..., None] * v
    kv = torch.addcmul(kv, state.kv, rescale[..., None]) if traced() else kv.addcmul_(state.kv, rescale[..., None])
    after = LinearState(kv, torch.addcmul(values, state.k, rescale), log_scale)
    return read(q, after), after


def masked_keys(phi: Callable[[Tensor], Mapped], k: Tensor, key_mask: Tensor | None) -> Mapped:
    """``phi(k)``, where keys masked by (..., 1, S) have no features and take part in no maximum.

    They are dropped before the map too, which might overflow on what they hold.
    """
    return phi(k) if key_mask is None else _masked(phi(masks.drop(k, key_mask)), key_mask)


def _masked(keys: Any, key_mask: Tensor) -> Any:
    if isinstance(keys, Logs):
        return Logs(keys.logs.masked_fill(~key_mask[..., None], float("-inf")))
    values = masks.drop(keys.values, key_mask)
    if keys.log_scale is None:
        return Features(values)
    return Features(values, keys.log_scale.masked_fill(~key_mask, FLOOR))


def _later(size: int, like: Tensor) -> Tensor:
    """True where column j comes after row i, (size, size)."""
    return torch.ones(size, size, dtype=torch.bool, device=like.device).triu(1)
