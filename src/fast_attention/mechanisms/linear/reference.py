"""Kernelised attention from features, plain and differentiable: two products of matrices; causal, in chunks.

Keys may carry a logarithmic scale s_j. The sums of query i are then divided by e^(c_i), where c_i is the largest scale
among the keys it sees: every exponent that is taken is at most zero, and no key moves a query before it. Where features
come as logarithms, every feature has a scale of its own: see ``log_features``. Keys without scales, and values, are
brought by powers of two, which round nothing, to where no sum overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks, numerics
from fast_attention.engine.blocks import join, split, split_row
from fast_attention.engine.heads import short
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.tracing import symbolic, traced
from fast_attention.feature_maps.feature_map import Features, Logs
from fast_attention.mechanisms.linear import log_features
from fast_attention.mechanisms.linear.linear_state import (
    LinearState,
    Sums,
    empty,
    largest_is_one,
    normalise,
    prefixes,
    read,
    scaled,
    summarise,
)

Kind = TypeVar("Kind", Features, Logs, Features | Logs)
CHUNK = 128  # tokens per chunk of the causal form
SHORT = 256  # tokens of which all pairs are one product where they have as many features at least


def log_scale(keys: Features) -> Tensor:
    """The logarithm (..., 1) by which sums of these keys and many more do not overflow; 0 for ordinary ones."""
    return -numerics.factor(keys.values.flatten(-2), 2.0**20, rows=True).log()


def attention(queries: Features | Logs, keys: Features | Logs, v: Tensor, *, is_causal: bool, eps: float) -> Tensor:
    """Outputs (..., L, Ev); keys that have scales need no ``eps`` and get none."""
    if isinstance(keys, Logs) or isinstance(queries, Logs) or keys.log_scale is not None:
        return normalise(attend(queries.free, keys, v, is_causal=is_causal))
    less, smaller = numerics.factor(keys.values, 2.0**28), numerics.factor(v, 2.0**28)
    row = numerics.factor(queries.values, 2.0**40, rows=True)  # so much more than eps that it is no matter
    sums = attend(queries.values * row, Features(keys.values * less), v * smaller, is_causal=is_causal)
    return normalise(Sums(sums.numerator, sums.denominator + eps * less)) / smaller


def decode(
    queries: Features | Logs, keys: Features | Logs, v: Tensor, state: LinearState | None, *, eps: float
) -> tuple[Tensor, LinearState]:
    """``attention`` of new tokens behind ``state``, and the state after them."""
    if isinstance(keys, Logs) or isinstance(queries, Logs) or keys.log_scale is not None:
        sums, state = advance(queries.free, keys, v, state)
        return normalise(sums), state
    before = empty(keys, v) if state is None else state
    largest = torch.maximum(before.log_scale, log_scale(keys))
    rescale, factor = (before.log_scale - largest).exp(), (-largest).exp()
    before = LinearState(before.kv * rescale[..., None], before.k * rescale, largest)
    row = numerics.factor(queries.values, 1.0, rows=True)
    sums, state = advance(queries.values * row, Features(keys.values * factor[..., None]), v, before)
    return normalise(Sums(sums.numerator, sums.denominator + eps * factor * row[..., 0])), state


def summarised(keys: Features | Logs, v: Tensor) -> LinearState:
    """The state after keys and values."""
    if isinstance(keys, Logs) or keys.log_scale is not None:
        return summarise(keys, v)
    largest = log_scale(keys)
    return summarise(Features(keys.values * (-largest).exp()[..., None]), v)._replace(log_scale=largest)


def attend(
    q: Float[Tensor, "*batch length C"] | Logs,
    keys: Features | Logs,
    v: Float[Tensor, "*batch keys values"],
    *,
    is_causal: bool,
    chunk: int | None = None,
) -> Sums:
    """Sums of all queries; causal ones aligned to the bottom right where there are more or fewer queries than keys."""
    if not is_causal:
        return _pairs(q, keys, v) if short(q[0] if isinstance(q, Logs) else q, v) else read(q, summarise(keys, v))
    chunk = _chunk(q, v.shape[-2]) if chunk is None else chunk
    extra = v.shape[-2] - (q.logs if isinstance(q, Logs) else q).shape[-2]
    if extra == 0:
        sums = None if traced() or v.shape[-2] > chunk else _one_chunk(q, keys, v)
        return advance(q, keys, v, chunk=chunk)[0] if sums is None else sums
    if extra > 0:  # every query sees the first keys
        first, rest = sliced(keys, slice(0, extra)), sliced(keys, slice(extra, None))
        return advance(q, rest, v[..., extra:, :], summarise(first, v[..., :extra, :]), chunk=chunk)[0]
    last = Logs(q.logs[..., -extra:, :]) if isinstance(q, Logs) else q[..., -extra:, :]
    sums = advance(last, keys, v, chunk=chunk)[0]
    return Sums(F.pad(sums.numerator, (0, 0, -extra, 0)), F.pad(sums.denominator, (-extra, 0)))


def _pairs(q: Tensor | Logs, keys: Features | Logs, v: Tensor) -> Sums:
    """``read(q, summarise(keys, v))`` of sequences so short that a state for each weighs more than all their pairs."""
    k, log_scale = scaled(keys)
    pairs = (largest_is_one(q, log_scale[..., None, :]) if isinstance(q, Logs) else q) @ k.mT
    return Sums(pairs @ v, pairs.sum(-1))


def _chunk(q: Tensor | Logs, length: int) -> int:
    short = not traced() and not isinstance(q, Logs) and length <= min(q.shape[-1], SHORT)
    return length if short else CHUNK


def _one_chunk(q: Tensor | Logs, keys: Features | Logs, v: Tensor) -> Sums | None:
    """Sums of a sequence that is one chunk by one masked product, without a state; None if its numbers forbid that."""
    if isinstance(q, Logs) or isinstance(keys, Logs):
        return log_features.one_chunk(q, keys, v)  # type: ignore[arg-type]
    pairs = (q @ keys.values.mT).masked_fill(_later(v.shape[-2], q), 0.0)
    if keys.log_scale is not None:
        pairs = pairs * _rescaled(keys.log_scale, torch.full_like(keys.log_scale[..., 0], FLOOR))[0]
    return Sums(pairs @ v, pairs.sum(-1))


def advance(
    q: Float[Tensor, "*batch n C"] | Logs,
    keys: Features | Logs,
    v: Float[Tensor, "*batch n values"],
    state: LinearState | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Sums, LinearState]:
    """Causal sums over new tokens behind ``state``, and the state after them; ``q`` are features, free of a factor.

    A masked product inside each chunk, the prefix of the chunks' states across them. Time O(n C (chunk + Ev)), memory
    O(n C Ev / chunk + n chunk); the result does not depend on ``chunk``.
    """
    length = v.shape[-2]
    if not symbolic():
        chunk = min(chunk, length)
        if length == 1 and state is not None:
            return step(q, keys, v, state)
    state = empty(keys, v) if state is None else state
    if isinstance(keys, Logs):
        assert isinstance(q, Logs)
        return log_features.advance(q, keys, v, state, chunk=chunk)
    assert isinstance(q, Tensor)
    q, k, v = split(q, chunk), split(keys.values, chunk), split(v, chunk)
    pairs, log_scales, carried = (q @ k.mT).masked_fill(_later(chunk, q), 0.0), None, None
    if keys.log_scale is not None:
        scale = split_row(keys.log_scale, chunk, value=FLOOR)
        log_scales = torch.cat([state.log_scale, scale.detach().amax(-1)], -1)
        log_scales = cummax(log_scales, -1)
        factors, carried = _rescaled(scale, log_scales[..., :-1])
        pairs, k = pairs * factors, k * (scale - log_scales[..., 1:, None]).exp()[..., None]
    kv, z = prefixes(state, k.mT @ v, k.sum(-2), log_scales)
    before = read(q, LinearState(kv[..., :-1, :, :], z[..., :-1, :], state.log_scale[..., None, :]))
    if carried is not None:
        before = Sums(before.numerator * carried[..., None], before.denominator * carried)
    numerator = join(pairs @ v + before.numerator, length)
    denominator = join((pairs.sum(-1) + before.denominator)[..., None], length)[..., 0]
    log_scale = state.log_scale if log_scales is None else log_scales[..., -1:]
    return Sums(numerator, denominator), LinearState(kv[..., -1, :, :], z[..., -1, :], log_scale)


def step(q: Tensor | Logs, keys: Features | Logs, v: Tensor, state: LinearState) -> tuple[Sums, LinearState]:
    """``advance`` by one token: one pass over the state rescales it and adds to it, another reads it."""
    if isinstance(keys, Logs):
        scale, values = keys.logs[..., 0, :], torch.ones_like(state.k)
    else:
        scale, values = keys.log_scale, keys.values[..., 0, :]
    if scale is None:
        after = LinearState(state.kv + values[..., None] * v, state.k + values, state.log_scale)
        return read(q, after), after
    log_scale = torch.maximum(state.log_scale, scale.detach())
    rescale, values = (state.log_scale - log_scale).exp(), values * (scale - log_scale).exp()
    kv = values[..., None] * v
    kv = torch.addcmul(kv, state.kv, rescale[..., None]) if traced() else kv.addcmul_(state.kv, rescale[..., None])
    after = LinearState(kv, torch.addcmul(values, state.k, rescale), log_scale)
    return read(q, after), after


def masked_keys(phi: Callable[[Tensor], Kind], k: Tensor, key_mask: Tensor | None) -> Kind:
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


def sliced(keys: Features | Logs, tokens: slice) -> Features | Logs:
    """The features of some tokens."""
    if isinstance(keys, Logs):
        return Logs(keys.logs[..., tokens, :])
    return Features(keys.values[..., tokens, :], None if keys.log_scale is None else keys.log_scale[..., tokens])


def _rescaled(scale: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Factors e^(s_j - c_i) of key j for query i of its chunk, and of the state before the chunk for query i.

    ``scale`` (..., N, c) are the keys' scales in chunks, ``past`` (..., N) the largest before each chunk. One factor
    for each pair (..., N, c, c), because one for the whole chunk would do harm: a far larger key late in it would
    make those before it vanish, for the queries in between as well.
    """
    running_max = torch.maximum(cummax(scale.detach(), -1), past[..., None])
    pairs = scale[..., None, :] - running_max[..., :, None]
    pairs = pairs.masked_fill(_later(scale.shape[-1], scale), float("-inf")).exp()
    return pairs, (past[..., None] - running_max).exp()


def _later(size: int, like: Tensor) -> Tensor:
    """True where column j comes after row i, (size, size)."""
    return torch.ones(size, size, dtype=torch.bool, device=like.device).triu(1)
