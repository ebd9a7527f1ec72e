"""Kernelised attention from features: two products of matrices, a constant state, and a causal form in blocks.

Everything here is unnormalised: sums ``phi(q_i) . phi(k_j) v_j`` (numerators) and ``phi(q_i) . phi(k_j)``
(denominators). Keys may carry a logarithmic scale s_j. Query i then works in units of e^(c_i), where c_i is the largest
scale among the keys it sees: every exponent that is taken is at most zero, and no key moves a query before it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.ops.blocks import join, pad_length, split
from fast_attention.ops.features import Features

CHUNK = 128  # tokens per block of the causal form
GROUP = 32  # states that are combined pair by pair


class LinearState(NamedTuple):
    """What a stretch of keys and values leaves behind; the true sums are ``exp(top)`` times ``kv`` and ``k``."""

    kv: Float[Tensor, "*batch C values"]  # sum_j phi(k_j) v_j^T
    k: Float[Tensor, "*batch C"]  # sum_j phi(k_j)
    top: Float[Tensor, "*batch"]  # the largest logarithmic scale of a key; 0 for features without one


class Sums(NamedTuple):
    """Numerators (..., L, Ev) and denominators (..., L) of the outputs, up to one factor per query."""

    numerator: Float[Tensor, "*batch length values"]
    denominator: Float[Tensor, "*batch length"]


def mask(keys: Features, key_mask: Tensor | None) -> Features:
    """``keys`` with the masked ones (..., 1, S) without features and out of every maximum."""
    if key_mask is None:
        return keys
    values = keys.values.masked_fill(~key_mask[..., None], 0.0)
    if keys.log_scale is None:
        return Features(values)
    return Features(values, keys.log_scale.masked_fill(~key_mask, _floor(values)))


def empty(keys: Features, v: Tensor) -> LinearState:
    """The state before the first key."""
    k = torch.zeros_like(keys.values[..., 0, :])
    top = k[..., 0] if keys.log_scale is None else torch.full_like(k[..., 0], _floor(k))
    return LinearState(k.new_zeros((*k.shape, v.shape[-1])), k, top)


def summarise(keys: Features, v: Tensor) -> LinearState:
    """The state after a stretch of keys (..., S, C) and values (..., S, Ev)."""
    values = keys.values
    top = torch.zeros_like(values[..., 0, 0])
    if keys.log_scale is not None:
        top = keys.log_scale.detach().amax(-1)
        values = values * (keys.log_scale - top[..., None]).exp()[..., None]
    return LinearState(values.mT @ v, values.sum(-2), top)


def combine(earlier: LinearState, later: LinearState) -> LinearState:
    """The state of two neighbouring stretches; associative."""
    top = torch.maximum(earlier.top, later.top)
    a, b = (earlier.top - top).exp()[..., None], (later.top - top).exp()[..., None]
    kv = a[..., None] * earlier.kv + b[..., None] * later.kv
    return LinearState(kv, a * earlier.k + b * later.k, top)


def read(q: Float[Tensor, "*batch length C"], state: LinearState) -> Sums:
    """What the queries' features find in a state, in units of ``exp(state.top)``."""
    return Sums(q @ state.kv, (q @ state.k[..., None])[..., 0])


def advance(
    q: Float[Tensor, "*batch n C"],
    keys: Features,
    v: Float[Tensor, "*batch n values"],
    state: LinearState | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Sums, LinearState]:
    """Causal sums over a stretch that follows ``state``, and the state after it.

    Blocks of ``chunk`` tokens: a masked product inside each, the prefix of the blocks' states across them. Time
    O(n C (chunk + Ev)), memory O(n C Ev / chunk + n chunk); the result does not depend on ``chunk``.
    """
    length = q.shape[-2]
    if not torch.compiler.is_compiling():
        chunk = min(chunk, length)
    state = empty(keys, v) if state is None else state
    q, k, v = split(q, chunk), split(keys.values, chunk), split(v, chunk)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    within = (q @ k.mT).masked_fill(later, 0.0)
    carry = tops = None
    if keys.log_scale is not None:
        scale = pad_length(keys.log_scale, chunk, axis=-1, value=_floor(k)).unflatten(-1, (-1, chunk))
        tops = torch.cat([state.top[..., None], scale.detach().amax(-1)], -1)
        past = tops.cummax(-1).values
        running = torch.maximum(scale.detach().cummax(-1).values, past[..., :-1, None])
        within = within * (scale[..., None, :] - running[..., :, None]).masked_fill(later, float("-inf")).exp()
        carry = (past[..., :-1, None] - running).exp()
        k = k * (scale - tops[..., 1:, None]).exp()[..., None]
    sums = torch.cat([state.kv[..., None, :, :], k.mT @ v], -3), torch.cat([state.k[..., None, :], k.sum(-2)], -2)
    kv, z = _prefixes(*sums, tops)
    before = read(q, LinearState(kv[..., :-1, :, :], z[..., :-1, :], state.top))
    if carry is not None:
        before = Sums(before.numerator * carry[..., None], before.denominator * carry)
    numerator = join(within @ v + before.numerator, length)
    denominator = (within.sum(-1) + before.denominator).flatten(-2)[..., :length]
    top = state.top if tops is None else tops.amax(-1)
    return Sums(numerator, denominator), LinearState(kv[..., -1, :, :], z[..., -1, :], top)


def attend(
    q: Float[Tensor, "*batch length C"],
    keys: Features,
    v: Float[Tensor, "*batch keys values"],
    *,
    is_causal: bool,
    chunk: int = CHUNK,
) -> Sums:
    """All sums at once; causal ones aligned to the bottom right where there are more or fewer queries than keys."""
    if not is_causal:
        return read(q, summarise(keys, v))
    extra = v.shape[-2] - q.shape[-2]
    if extra == 0:
        return advance(q, keys, v, chunk=chunk)[0]
    if extra > 0:  # every query sees the first keys
        log_scale = keys.log_scale
        first = Features(keys.values[..., :extra, :], None if log_scale is None else log_scale[..., :extra])
        rest = Features(keys.values[..., extra:, :], None if log_scale is None else log_scale[..., extra:])
        return advance(q, rest, v[..., extra:, :], summarise(first, v[..., :extra, :]), chunk=chunk)[0]
    seeing = advance(q[..., -extra:, :], keys, v, chunk=chunk)[0]
    return Sums(F.pad(seeing.numerator, (0, 0, -extra, 0)), F.pad(seeing.denominator, (-extra, 0)))


def normalise(sums: Sums) -> Float[Tensor, "*batch length values"]:
    """Numerators over denominators; zeros where a denominator is zero, or so small that a quotient means nothing."""
    info = torch.finfo(sums.denominator.dtype)
    nothing = sums.denominator.abs() < info.tiny / info.eps
    quotient = sums.numerator / sums.denominator.masked_fill(nothing, 1.0)[..., None]
    return quotient.masked_fill(nothing[..., None], 0.0)


def _floor(like: Tensor) -> float:
    """The scale of a key that is not there: below every other, yet finite, so that differences are numbers."""
    return torch.finfo(like.dtype).min


def _prefixes(kv: Tensor, k: Tensor, tops: Tensor | None) -> tuple[Tensor, Tensor]:
    """Inclusive prefix sums of N states (..., N, C, Ev) and (..., N, C) whose scales are ``tops`` (..., N)."""
    if tops is None:
        return kv.cumsum(-3), k.cumsum(-2)
    levels, count = 1, tops.shape[-1]  # one level serves millions of tokens and asks no traced length
    if not torch.compiler.is_compiling():
        levels = 0
        while count > GROUP:
            count, levels = -(-count // GROUP), levels + 1
    flat = _prefix(torch.cat([kv.flatten(-2), k], -1), tops, levels)
    size = kv.shape[-2] * kv.shape[-1]
    return flat[..., :size].unflatten(-1, kv.shape[-2:]), flat[..., size:]


def _prefix(x: Tensor, tops: Tensor, levels: int) -> Tensor:
    """``y_i = sum_{j <= i} exp(tops_j - running_i) x_j`` with running_i the maximum of tops up to i; x (..., N, W).

    No one scale fits all of them, so plain cumulative sums would not do: groups are combined pair by pair, then the
    groups' totals in the same way, ``levels`` times over.
    """
    running = tops.cummax(-1).values
    if levels == 0:
        factors = tops[..., None, :] - running[..., :, None]
        later = torch.ones(factors.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return factors.masked_fill(later, float("-inf")).exp() @ x
    group_tops = pad_length(tops, GROUP, axis=-1, value=_floor(x)).unflatten(-1, (-1, GROUP))
    inside = _prefix(split(x, GROUP), group_tops, 0)
    inside_top = group_tops.cummax(-1).values
    before = _prefix(inside[..., -1, :], inside_top[..., -1], levels - 1)
    before = F.pad(before, (0, 0, 1, 0))[..., :-1, :]
    before_top = F.pad(inside_top[..., -1].cummax(-1).values, (1, 0), value=_floor(x))[..., :-1, None]
    both = torch.maximum(inside_top, before_top)
    y = inside * (inside_top - both).exp()[..., None] + before[..., None, :] * (before_top - both).exp()[..., None]
    return join(y, tops.shape[-1])
