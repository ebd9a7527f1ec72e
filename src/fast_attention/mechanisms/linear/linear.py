"""Kernelised attention from features: two products of matrices, a constant state, and a causal form in blocks.

Everything here is unnormalised: sums ``phi(q_i) . phi(k_j) v_j`` (numerators) and ``phi(q_i) . phi(k_j)``
(denominators). Keys may carry a logarithmic scale s_j. Query i then works in units of e^(c_i), where c_i is the largest
scale among the keys it sees: every exponent that is taken is at most zero, and no key moves a query before it. Where
features come as logarithms, every feature has a unit of its own: see ``linear_logs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks
from fast_attention.engine.blocks import join, split, split_row
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.tracing import traced
from fast_attention.feature_maps.feature_map import Features, Logs
from fast_attention.mechanisms.linear import linear_logs
from fast_attention.mechanisms.linear.linear_state import LinearState as LinearState
from fast_attention.mechanisms.linear.linear_state import Sums as Sums
from fast_attention.mechanisms.linear.linear_state import prefixes
from fast_attention.mechanisms.linear.linear_state import read as read

Kind = TypeVar("Kind", Features, Logs, Features | Logs)
CHUNK = 128  # tokens per block of the causal form


def masked_keys(phi: Callable[[Tensor], Kind], k: Tensor, key_mask: Tensor | None) -> Kind:
    """``phi(k)``, the keys masked by (..., 1, S) without features and out of every maximum.

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


def empty(keys: Features | Logs, v: Tensor) -> LinearState:
    """The state before the first key."""
    if isinstance(keys, Logs):
        k = torch.zeros_like(keys.logs[..., 0, :])
        return LinearState(k.new_zeros((*k.shape, v.shape[-1])), k, torch.full_like(k, FLOOR))
    k = torch.zeros_like(keys.values[..., 0, :])
    top = k[..., :1] if keys.log_scale is None else torch.full_like(k[..., :1], FLOOR)
    return LinearState(k.new_zeros((*k.shape, v.shape[-1])), k, top)


def summarise(keys: Features | Logs, v: Tensor) -> LinearState:
    """The state after a stretch of keys (..., S, C) and values (..., S, Ev)."""
    if isinstance(keys, Logs):
        top = keys.logs.detach().amax(-2).clamp_min(FLOOR)
        values = (keys.logs - top[..., None, :]).exp_()
    else:
        values, top = keys.values, torch.zeros_like(keys.values[..., 0, :1])
        if keys.log_scale is not None:
            top = keys.log_scale.detach().amax(-1, keepdim=True)
            values = values * (keys.log_scale - top).exp()[..., None]
    return LinearState(values.mT @ v, values.sum(-2), top)


def combine(earlier: LinearState, later: LinearState) -> LinearState:
    """The state of two neighbouring stretches; associative."""
    top = torch.maximum(earlier.top, later.top)
    a, b = (earlier.top - top).exp(), (later.top - top).exp()
    kv = a[..., None] * earlier.kv + b[..., None] * later.kv
    return LinearState(kv, a * earlier.k + b * later.k, top)


def advance(
    q: Float[Tensor, "*batch n C"] | Logs,
    keys: Features | Logs,
    v: Float[Tensor, "*batch n values"],
    state: LinearState | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Sums, LinearState]:
    """Causal sums over a stretch that follows ``state``, and the state after it; ``q`` are features, free of a factor.

    Blocks of ``chunk`` tokens: a masked product inside each, the prefix of the blocks' states across them. Time
    O(n C (chunk + Ev)), memory O(n C Ev / chunk + n chunk); the result does not depend on ``chunk``.
    """
    length = v.shape[-2]
    if not torch.compiler.is_compiling():
        chunk = min(chunk, length)
        if length == 1 and state is not None:
            return step(q, keys, v, state)
    state = empty(keys, v) if state is None else state
    if isinstance(keys, Logs):
        assert isinstance(q, Logs)
        return linear_logs.advance(q, keys, v, state, chunk=chunk)
    assert isinstance(q, Tensor)
    q, k, v = split(q, chunk), split(keys.values, chunk), split(v, chunk)
    within, tops, carry = (q @ k.mT).masked_fill(_later(chunk, q), 0.0), None, None
    if keys.log_scale is not None:
        scale = split_row(keys.log_scale, chunk, value=FLOOR)
        tops = torch.cat([state.top, scale.detach().amax(-1)], -1)
        tops = cummax(tops, -1)
        pairs, carry = _units(scale, tops[..., :-1])
        within, k = within * pairs, k * (scale - tops[..., 1:, None]).exp()[..., None]
    kv, z = prefixes(state, k.mT @ v, k.sum(-2), tops)
    before = read(q, LinearState(kv[..., :-1, :, :], z[..., :-1, :], state.top[..., None, :]))
    if carry is not None:
        before = Sums(before.numerator * carry[..., None], before.denominator * carry)
    numerator = join(within @ v + before.numerator, length)
    denominator = join((within.sum(-1) + before.denominator)[..., None], length)[..., 0]
    top = state.top if tops is None else tops[..., -1:]
    return Sums(numerator, denominator), LinearState(kv[..., -1, :, :], z[..., -1, :], top)


def step(q: Tensor | Logs, keys: Features | Logs, v: Tensor, state: LinearState) -> tuple[Sums, LinearState]:
    """``advance`` by one token: a pass over the state to fade it and add to it, one to read."""
    if isinstance(keys, Logs):
        level, values = keys.logs[..., 0, :], torch.ones_like(state.k)
    else:
        level, values = keys.log_scale, keys.values[..., 0, :]
    if level is None:
        return read(q, after := LinearState(state.kv + values[..., None] * v, state.k + values, state.top)), after
    top = torch.maximum(state.top, level.detach())
    fading, values = (state.top - top).exp(), values * (level - top).exp()
    kv = torch.addcmul(values[..., None] * v, state.kv, fading[..., None])
    after = LinearState(kv, torch.addcmul(values, state.k, fading), top)
    return read(q, after), after


def _units(scale: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Factors that turn the units of key j, and those of the state before its block, into query i's: e^(s_j - c_i).

    ``scale`` (..., N, c) are the keys' scales in blocks, ``past`` (..., N) the largest before each block. One factor
    for each pair (..., N, c, c), because one for the whole block would do harm: a far larger key late in it would
    make those before it vanish, for the queries in between as well.
    """
    running = torch.maximum(cummax(scale.detach(), -1), past[..., None])
    pairs = scale[..., None, :] - running[..., :, None]
    pairs = pairs.masked_fill(_later(scale.shape[-1], scale), float("-inf")).exp()
    return pairs, (past[..., None] - running).exp()


def _later(size: int, like: Tensor) -> Tensor:
    """True where column j comes after row i, (size, size)."""
    return torch.ones(size, size, dtype=torch.bool, device=like.device).triu(1)


def attend(
    q: Float[Tensor, "*batch length C"] | Logs,
    keys: Features | Logs,
    v: Float[Tensor, "*batch keys values"],
    *,
    is_causal: bool,
    chunk: int = CHUNK,
) -> Sums:
    """All sums at once; causal ones aligned to the bottom right where there are more or fewer queries than keys."""
    if not is_causal:
        return read(q, summarise(keys, v))
    extra = v.shape[-2] - (q.logs if isinstance(q, Logs) else q).shape[-2]
    if extra == 0:
        found = None
        if isinstance(keys, Logs) and isinstance(q, Logs) and not traced() and v.shape[-2] <= chunk:
            found = linear_logs.alone(q, keys, v)
        return advance(q, keys, v, chunk=chunk)[0] if found is None else found
    if extra > 0:  # every query sees the first keys
        first, rest = part(keys, slice(0, extra)), part(keys, slice(extra, None))
        return advance(q, rest, v[..., extra:, :], summarise(first, v[..., :extra, :]), chunk=chunk)[0]
    last = Logs(q.logs[..., -extra:, :]) if isinstance(q, Logs) else q[..., -extra:, :]
    seeing = advance(last, keys, v, chunk=chunk)[0]
    return Sums(F.pad(seeing.numerator, (0, 0, -extra, 0)), F.pad(seeing.denominator, (-extra, 0)))


def part(keys: Features | Logs, tokens: slice) -> Features | Logs:
    """Those of some tokens."""
    if isinstance(keys, Logs):
        return Logs(keys.logs[..., tokens, :])
    return Features(keys.values[..., tokens, :], None if keys.log_scale is None else keys.log_scale[..., tokens])


def normalise(sums: Sums, eps: float = 0.0) -> Float[Tensor, "*batch length values"]:
    """Numerators over denominators plus ``eps``; zeros where that is zero, or too small for a quotient to mean much."""
    denominator = sums.denominator + eps if eps else sums.denominator
    info = torch.finfo(denominator.dtype)
    nothing = denominator.abs() < info.tiny / info.eps
    quotient = sums.numerator / denominator.masked_fill(nothing, 1.0)[..., None]
    return quotient.masked_fill(nothing[..., None], 0.0)
