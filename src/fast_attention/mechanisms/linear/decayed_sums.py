"""Sums of kernelised attention that decay from token to token: what ``DecayedLinearAttention`` computes.

Blocks of ``BLOCK`` tokens side by side: a masked product inside each, the decayed prefix of the blocks' states across
them. Every exponent that is taken is at most zero; logarithms are summed in float64, where millions of tokens lose
nothing. Decays are (..., L, 1), or (..., L, C), one for each feature of the keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import numerics, operation
from fast_attention.engine.blocks import join, smaller, split, split_row
from fast_attention.engine.heads import short
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.linear import linear_state, reference
from fast_attention.mechanisms.linear.linear_state import LinearState, Sums, empty, prefixes
from fast_attention.mechanisms.linear.log_features import pairs_by_halves

BLOCK = 64  # tokens whose pairs are taken


class DecayedState(NamedTuple):
    """Sums over all tokens so far, ``exp(log_scale)`` times ``kv`` and ``k``, and the decay over all of them."""

    kv: Float[Tensor, "*batch C values"]
    k: Float[Tensor, "*batch C"]
    log_scale: Float[Tensor, "*batch 1"]
    log_decay: Float[Tensor, "*batch decays"]


def attend(
    queries: Features, keys: Features, v: Tensor, log_decay: Tensor, *, normalize: bool, eps: float
) -> Tensor:  # fmt: skip
    """Causal outputs (..., L, Ev)."""
    state = empty(keys, v)
    if not operation.unsupported_reason(v, even=True) and short(queries.values):  # it would weigh more than all pairs
        state = None
    return _decode(queries, keys, v, log_decay, state, normalize=normalize, eps=eps)[0]


def decode(
    queries: Features, keys: Features, v: Tensor, log_decay: Tensor, state: LinearState | None, *, normalize: bool,
    eps: float,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Outputs of tokens behind ``state``, and the state after them."""
    state = empty(keys, v) if state is None else state
    out, after = _decode(queries, keys, v, log_decay, state, normalize=normalize, eps=eps)
    assert after is not None
    return out, after


def summarise(keys: Features, v: Tensor, log_decay: Tensor) -> DecayedState:
    """The state after some tokens that nothing precedes."""
    log_scale, reached = reference.log_scale(keys), log_decay.double().cumsum(-2)
    rescale = (reached[..., -1:, :] - reached).exp().to(v.dtype)
    scaled = keys.values * (-log_scale).exp()[..., None] * rescale
    return DecayedState(scaled.mT @ v, scaled.sum(-2), log_scale, reached[..., -1, :].to(v.dtype))


def combine(earlier: DecayedState, later: DecayedState) -> DecayedState:
    """The state of neighbouring tokens; associative."""
    log_scale = torch.maximum(earlier.log_scale, later.log_scale)
    a, b = (earlier.log_scale - log_scale + later.log_decay).exp(), (later.log_scale - log_scale).exp()
    kv = a[..., None] * earlier.kv + b[..., None] * later.kv
    return DecayedState(kv, a * earlier.k + b * later.k, log_scale, earlier.log_decay + later.log_decay)


def _decode(
    queries: Features, keys: Features, v: Tensor, log_decay: Tensor, state: LinearState | None, *, normalize: bool,
    eps: float,
) -> tuple[Tensor, LinearState | None]:  # fmt: skip
    """Without a ``state`` the tokens are all there are, one block at most: no state comes behind them either."""
    advance = _advance if log_decay.shape[-1] == 1 else _advance_by_channel
    largest = reference.log_scale(keys)
    if state is not None:
        largest = torch.maximum(state.log_scale, largest)
        rescale = (state.log_scale - largest).exp()
        state = LinearState(state.kv * rescale[..., None], state.k * rescale, largest)
    factor, row = (-largest).exp(), numerics.factor(queries.values, 1.0, rows=True)
    sums, after = advance(queries.values * row, keys.values * factor[..., None], v, log_decay, state)
    scale = factor * row[..., 0]
    if not normalize:
        return sums.numerator / scale[..., None], after
    return linear_state.normalise(Sums(sums.numerator, sums.denominator + eps * scale)), after


def _advance(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, before: LinearState | None
) -> tuple[Sums, LinearState | None]:
    """Sums over features and values in blocks: pairs inside each, the states before them across."""
    length = v.shape[-2]
    size = smaller(BLOCK, length)
    q, k, v, steps = split(q, size), split(k, size), split(v, size), split_row(log_decay[..., 0].double(), size)
    reached = steps.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decay = (reached[..., :, None] - reached[..., None, :]).masked_fill(later, float("-inf")).exp().to(v.dtype)
    pairs, total = (q @ k.mT) * decay, reached[..., -1]
    k = k * (total[..., None] - reached).exp().to(v.dtype)[..., None]
    logs = torch.cat([torch.zeros_like(total[..., :1]), -total.cumsum(-1)], -1)
    return _over_blocks(pairs, q * reached.exp().to(v.dtype)[..., None], k, v, logs, before, length)


def _over_blocks(
    pairs: Tensor, q: Tensor, k: Tensor, v: Tensor, logs: Tensor, before: LinearState | None, length: int
) -> tuple[Sums, LinearState | None]:
    """The sums of ``pairs`` in blocks, and of all blocks before: queries from a block's start on, keys to its end."""
    if before is None:
        return Sums(join(pairs @ v, length), join(pairs.sum(-1, keepdim=True), length)[..., 0]), None
    kv, z = prefixes(before, k.mT @ v, k.sum(-2), logs)
    numerator = join(pairs @ v + q @ kv[..., :-1, :, :], length)
    before_chunk = (q @ z[..., :-1, :, None])[..., 0]
    denominator = join((pairs.sum(-1) + before_chunk)[..., None], length)[..., 0]
    return Sums(numerator, denominator), LinearState(kv[..., -1, :, :], z[..., -1, :], before.log_scale)


def _advance_by_channel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, before: LinearState | None
) -> tuple[Sums, LinearState | None]:
    """``_advance`` where every feature decays by itself; blocks of a power of two."""
    length = v.shape[-2]
    size = 1 << (smaller(BLOCK, length) - 1).bit_length()
    q, k, v, steps = split(q, size), split(k, size), split(v, size), split(log_decay.double(), size)
    reached = steps.cumsum(-2)
    pairs, total = pairs_by_halves(reached, -reached, torch.zeros_like(reached[..., :1]), q, k), reached[..., -1, :]
    k = k * (total[..., None, :] - reached).to(v.dtype).exp()
    logs = torch.cat([torch.zeros_like(total[..., :1, :]), -total.cumsum(-2)], -2)
    return _over_blocks(pairs, q * reached.to(v.dtype).exp(), k, v, logs, before, length)
