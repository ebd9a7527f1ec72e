"""Sums of kernelised attention that decay from token to token: what ``DecayedLinearAttention`` computes.

Blocks of ``BLOCK`` tokens side by side: a masked product inside each, the decayed prefix of the blocks' states across
them. Every exponent that is taken is at most zero; logarithms are summed in float64, where millions of tokens lose
nothing. Decays are (..., L, 1), or (..., L, C), one for each feature of the keys.

Scores of tokens whose features each decay by themselves (GLA, Yang et al. 2023): no exponent above zero is taken.

Between the halves of a block, queries decay from the middle on and keys up to it: a product. Triangles fall into such
squares by halving, down to single tokens.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import numerics, operation
from fast_attention.engine.blocks import join, smaller, split, split_row
from fast_attention.engine.heads import short
from fast_attention.engine.tracing import replaced
from fast_attention.feature_maps.feature_map import FeatureMap, Features
from fast_attention.mechanisms.linear import in_range, linear_state, reference
from fast_attention.mechanisms.linear.linear_state import LinearState, Sums, prefixes

BLOCK = 64  # tokens whose pairs are taken


class DecayedState(NamedTuple):
    """Sums over all tokens so far, ``exp(log_scale)`` times ``kv`` and ``k``, and the decay over all of them."""

    kv: Float[Tensor, "*batch C values"]
    k: Float[Tensor, "*batch C"]
    log_scale: Float[Tensor, "*batch 1"]
    log_decay: Float[Tensor, "*batch decays"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, normalize: bool,
    eps: float, is_causal: bool,
) -> Tensor:  # fmt: skip
    """Outputs (..., L, Ev); not causal, the sums from the left and those from the right."""
    directed, empty = partial(_directed, phi=phi, normalize=normalize), None
    if operation.unsupported_reason(q, k, v, even=True) or not short(q):  # states would weigh more than all pairs
        empty = _empty(k, v, phi, log_decay)
    if is_causal:
        return _finished(*directed(q, k, v, log_decay, key_mask, empty, eps=eps)[0], normalize)
    if empty is not None:
        empty = replaced(empty, log_scale=in_range.log_scale(_keys(phi, k, key_mask)))  # one for both directions
    left = directed(q, k, v, log_decay, key_mask, empty, eps=eps)[0]
    to_next = F.pad(log_decay, (0, 0, 0, 1))[..., 1:, :].flip(-2)
    mask = None if key_mask is None else key_mask.flip(-1)
    q, k, v = (x.flip(-2) for x in (q, k, v))
    right = directed(q, k, v, to_next, mask, empty, eps=0.0, strict=True)[0]
    numerator, denominator = (a + b.flip(-2) for a, b in zip(left, right, strict=True))
    return _finished(numerator, denominator, normalize)


def streamed(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, state: DecayedState | None, *,
    phi: FeatureMap, normalize: bool, eps: float,
) -> tuple[Tensor, DecayedState]:  # fmt: skip
    """Outputs of tokens behind ``state``, and the state after them."""
    state = _empty(k, v, phi, log_decay) if state is None else state
    sums, after = _directed(q, k, v, log_decay, key_mask, state, phi=phi, normalize=normalize, eps=eps)
    return _finished(*sums, normalize), DecayedState(*after)


def summarise(k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *, phi: FeatureMap) -> DecayedState:
    """The state after some tokens that nothing precedes."""
    keys = _keys(phi, k, key_mask)
    log_scale, reached = in_range.log_scale(keys), log_decay.double().cumsum(-2)
    rescale = (reached[..., -1:, :] - reached).exp().to(v.dtype)
    scaled = keys.values * (-log_scale).exp()[..., None] * rescale
    return DecayedState(scaled.mT @ v, scaled.sum(-2), log_scale, reached[..., -1, :].to(v.dtype))


def combine(earlier: DecayedState, later: DecayedState) -> DecayedState:
    """The state of neighbouring tokens; associative."""
    log_scale = torch.maximum(earlier.log_scale, later.log_scale)
    a, b = (earlier.log_scale - log_scale + later.log_decay).exp(), (later.log_scale - log_scale).exp()
    kv = a[..., None] * earlier.kv + b[..., None] * later.kv
    return DecayedState(kv, a * earlier.k + b * later.k, log_scale, earlier.log_decay + later.log_decay)


def _directed(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, state: DecayedState | None, *,
    phi: FeatureMap, normalize: bool, eps: float, strict: bool = False,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:  # fmt: skip
    """Numerators and denominators (..., L, 1) over the tokens up to each, and the state; ``strict``: before each.

    Without a ``state`` the tokens are all there are, one block at most: no state comes behind them either.
    """
    advance = _advance if log_decay.shape[-1] == 1 else _advance_by_channel
    keys, queries = _keys(phi, k, key_mask), phi(q)
    log_scale = in_range.log_scale(keys)
    if state is not None:
        log_scale = torch.maximum(state.log_scale, log_scale)
        rescale = (state.log_scale - log_scale).exp()
        state = DecayedState(state.kv * rescale[..., None], state.k * rescale, log_scale, state.log_decay)
    factor, less = (-log_scale).exp(), numerics.factor(queries, 1.0, rows=True)
    sums, after = advance(queries * less, keys.values * factor[..., None], v, log_decay, state, strict=strict)
    scale = factor[..., None] * less
    if normalize:
        return (sums.numerator, sums.denominator[..., None] + eps * scale), after
    return (sums.numerator / scale, sums.denominator[..., None]), after


def _advance(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, before: DecayedState | None, *, strict: bool
) -> tuple[Sums, tuple[Tensor, ...]]:
    """Sums over features and values in blocks: pairs inside each, the states before them across."""
    length = v.shape[-2]
    size = smaller(BLOCK, length)
    q, k, v, steps = split(q, size), split(k, size), split(v, size), split_row(log_decay[..., 0].double(), size)
    reached = steps.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(0 if strict else 1)
    decay = (reached[..., :, None] - reached[..., None, :]).masked_fill(later, float("-inf")).exp().to(v.dtype)
    pairs, total = (q @ k.mT) * decay, reached[..., -1]
    k = k * (total[..., None] - reached).exp().to(v.dtype)[..., None]
    logs = torch.cat([torch.zeros_like(total[..., :1]), -total.cumsum(-1)], -1)
    return _over_blocks(pairs, q * reached.exp().to(v.dtype)[..., None], k, v, logs, before, length)


def _over_blocks(
    pairs: Tensor, q: Tensor, k: Tensor, v: Tensor, logs: Tensor, before: DecayedState | None, length: int
) -> tuple[Sums, tuple[Tensor, ...]]:
    """The sums of ``pairs`` in blocks, and of all blocks before: queries from a block's start on, keys to its end."""
    if before is None:
        return Sums(join(pairs @ v, length), join(pairs.sum(-1, keepdim=True), length)[..., 0]), ()
    kv, z = prefixes(LinearState(*before[:3]), k.mT @ v, k.sum(-2), logs)
    numerator = join(pairs @ v + q @ kv[..., :-1, :, :], length)
    before_chunk = (q @ z[..., :-1, :, None])[..., 0]
    denominator = join((pairs.sum(-1) + before_chunk)[..., None], length)[..., 0]
    over_all = logs[..., -1:] if logs.ndim < z.ndim else logs[..., -1, :]
    log_decay = before.log_decay - over_all.to(v.dtype)
    return Sums(numerator, denominator), DecayedState(kv[..., -1, :, :], z[..., -1, :], before.log_scale, log_decay)


def pairs_by_channel(
    q: Float[Tensor, "*batch size C"],
    k: Float[Tensor, "*batch size C"],
    reached: Float[Tensor, "*batch size C"],
    *,
    strict: bool,
) -> Float[Tensor, "*batch size size"]:
    """``sum_c q_ic k_jc exp(reached_ic - reached_jc)`` for j <= i (``strict``: j < i), else 0; size is a power of two.

    ``reached``, which falls from token to token, may be of higher precision.
    """
    size = q.shape[-2]
    if size == 1:
        return torch.zeros_like(q[..., :1]) if strict else (q * k).sum(-1, keepdim=True)
    q, k, reached = (x.unflatten(-2, (2, size // 2)) for x in (q, k, reached))
    first, second = pairs_by_channel(q, k, reached, strict=strict).unbind(-3)
    middle = reached[..., 0, -1:, :]
    queries = q[..., 1, :, :] * (reached[..., 1, :, :] - middle).to(q.dtype).exp()
    keys = k[..., 0, :, :] * (middle - reached[..., 0, :, :]).to(k.dtype).exp()
    upper = torch.cat([first, torch.zeros_like(first)], -1)
    return torch.cat([upper, torch.cat([queries @ keys.mT, second], -1)], -2)


def _advance_by_channel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, before: DecayedState | None, *, strict: bool
) -> tuple[Sums, tuple[Tensor, ...]]:
    """``_advance`` where every feature decays by itself; blocks of a power of two."""
    length = v.shape[-2]
    size = 1 << (smaller(BLOCK, length) - 1).bit_length()
    q, k, v, steps = split(q, size), split(k, size), split(v, size), split(log_decay.double(), size)
    reached = steps.cumsum(-2)
    pairs, total = pairs_by_channel(q, k, reached, strict=strict), reached[..., -1, :]
    k = k * (total[..., None, :] - reached).to(v.dtype).exp()
    logs = torch.cat([torch.zeros_like(total[..., :1, :]), -total.cumsum(-2)], -2)
    return _over_blocks(pairs, q * reached.to(v.dtype).exp(), k, v, logs, before, length)


def _finished(numerator: Tensor, denominator: Tensor, normalize: bool) -> Tensor:
    return linear_state.normalise(Sums(numerator, denominator[..., 0])) if normalize else numerator


def _keys(phi: FeatureMap, k: Tensor, key_mask: Tensor | None) -> Features:
    return reference.masked_keys(lambda x: Features(phi(x)), k, key_mask)


def _empty(k: Tensor, v: Tensor, phi: FeatureMap, log_decay: Tensor) -> DecayedState:
    z = torch.zeros_like(phi(k[..., :1, :])[..., 0, :])
    nothing = torch.zeros_like(log_decay[..., 0, :], dtype=z.dtype)
    return DecayedState(z.new_zeros((*z.shape, v.shape[-1])), z, torch.zeros_like(z[..., :1]), nothing)
