"""Kernelised attention from features: two products of matrices, a constant state, and a causal form in blocks.

Everything here is unnormalised: sums ``phi(q_i) . phi(k_j) v_j`` (numerators) and ``phi(q_i) . phi(k_j)``
(denominators). Keys may carry a logarithmic scale s_j. Query i then works in units of e^(c_i), where c_i is the largest
scale among the keys it sees: every exponent that is taken is at most zero, and no key moves a query before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.ops import masks
from fast_attention.ops.blocks import join, split, split_row
from fast_attention.ops.maps.features import Features
from fast_attention.ops.scan import FLOOR, cummax
from fast_attention.ops.states import state_sums

CHUNK = 128  # tokens per block of the causal form


class LinearState(NamedTuple):
    """What a stretch of keys and values leaves behind; the true sums are ``exp(top)`` times ``kv`` and ``k``."""

    kv: Float[Tensor, "*batch C values"]  # sum_j phi(k_j) v_j^T
    k: Float[Tensor, "*batch C"]  # sum_j phi(k_j)
    top: Float[Tensor, "*batch"]  # the largest logarithmic scale of a key; 0 for features without one


class Sums(NamedTuple):
    """Numerators (..., L, Ev) and denominators (..., L) of the outputs, up to one factor per query."""

    numerator: Float[Tensor, "*batch length values"]
    denominator: Float[Tensor, "*batch length"]


def masked_keys(phi: Callable[[Tensor], Features], k: Tensor, key_mask: Tensor | None) -> Features:
    """``phi(k)``, the keys masked by (..., 1, S) without features and out of every maximum.

    They are dropped before the map too, which might overflow on what they hold.
    """
    if key_mask is None:
        return phi(k)
    keys = phi(masks.drop(k, key_mask))
    values = masks.drop(keys.values, key_mask)
    if keys.log_scale is None:
        return Features(values)
    return Features(values, keys.log_scale.masked_fill(~key_mask, FLOOR))


def empty(keys: Features, v: Tensor) -> LinearState:
    """The state before the first key."""
    k = torch.zeros_like(keys.values[..., 0, :])
    top = k[..., 0] if keys.log_scale is None else torch.full_like(k[..., 0], FLOOR)
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
    within, tops, carry = (q @ k.mT).masked_fill(_later(chunk, q), 0.0), None, None
    if keys.log_scale is not None:
        scale = split_row(keys.log_scale, chunk, value=FLOOR)
        tops = torch.cat([state.top[..., None], scale.detach().amax(-1)], -1)
        tops = cummax(tops, -1)
        pairs, carry = _units(scale, tops[..., :-1])
        within, k = within * pairs, k * (scale - tops[..., 1:, None]).exp()[..., None]
    kv, z = _prefixes(state, k.mT @ v, k.sum(-2), tops)
    before = read(q, LinearState(kv[..., :-1, :, :], z[..., :-1, :], state.top))
    if carry is not None:
        before = Sums(before.numerator * carry[..., None], before.denominator * carry)
    numerator = join(within @ v + before.numerator, length)
    denominator = join((within.sum(-1) + before.denominator)[..., None], length)[..., 0]
    top = state.top if tops is None else tops[..., -1]
    return Sums(numerator, denominator), LinearState(kv[..., -1, :, :], z[..., -1, :], top)


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


def _prefixes(first: LinearState, kv: Tensor, k: Tensor, tops: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums up to before block 0, up to block 0, and so on (..., N + 1, C, Ev) and (..., N + 1, C), in units e^tops."""
    begin = torch.cat([first.kv.flatten(-2), first.k], -1)[..., None, :]
    sums = torch.cat([begin, torch.cat([kv.flatten(-2), k], -1)], -2)
    sums = state_sums(sums, tops)
    size = kv.shape[-2] * kv.shape[-1]
    return sums[..., :size].unflatten(-1, kv.shape[-2:]), sums[..., size:]


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


def normalise(sums: Sums, eps: float = 0.0) -> Float[Tensor, "*batch length values"]:
    """Numerators over denominators plus ``eps``; zeros where that is zero, or too small for a quotient to mean much."""
    denominator = sums.denominator + eps if eps else sums.denominator
    info = torch.finfo(denominator.dtype)
    nothing = denominator.abs() < info.tiny / info.eps
    quotient = sums.numerator / denominator.masked_fill(nothing, 1.0)[..., None]
    return quotient.masked_fill(nothing[..., None], 0.0)
