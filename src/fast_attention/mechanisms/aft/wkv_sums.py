"""What ``WKV`` computes, in plain differentiable operations: pools of keys that decay, token by token, as a monoid.

``y_t = e^{-w} y_{t-1} + e^{k_t} v_t``, and the same of ones, read before token t is in it. With c_t visible tokens up
to t, the sum is AFT's of the keys ``k_t + c_t w``, times ``e^{-c_t w}``, which cancels between numerator and
denominator. In float64, where ``c_t w`` of millions of tokens loses nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.mechanisms.aft import reference
from fast_attention.mechanisms.aft.reference import Pool


class WKVState(NamedTuple):
    """Sums over all keys so far, ``exp(log_scale)`` times ``sums``, and the decay over all of them."""

    log_scale: Float[Tensor, "*batch 1 width"]
    sums: Float[Tensor, "*batch 1 both"]  # numerators, then denominators
    log_decay: Float[Tensor, "*batch 1 width"]


def counts(k: Float[Tensor, "*batch keys width"], key_mask: Bool[Tensor, "*#batch2 keys"] | None) -> Tensor:
    """The visible tokens up to each, (..., S, 1), in float64."""
    visible = torch.ones_like(k[..., 0], dtype=torch.float64)
    visible = visible if key_mask is None else visible.masked_fill(~key_mask, 0.0)
    return visible.cumsum(-1)[..., None]


def streamed(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: WKVState | None, key_mask: Tensor | None
) -> tuple[Tensor, WKVState]:
    """The means (..., L, D) that new tokens read behind ``state``, and the state after them.

    ``decay`` w and ``bonus`` u are (heads, 1, D). A masked token adds nothing, nothing decays at it, and it reads what
    is there.
    """
    count = counts(k, key_mask)
    scores, both = reference.terms(k.double() + count * decay, v.double(), key_mask)
    pool = None if state is None else Pool(state.log_scale.double(), state.sums.double())
    rows = reference.running(*reference.prepended(pool, scores, both))
    before = Pool(rows.log_scale[..., :-1, :], rows.sums[..., :-1, :])
    read = reference.combined(before, Pool(scores + (bonus - decay), both))
    log_decay = -count[..., -1:, :] * decay
    log_scale = rows.log_scale[..., -1:, :] + log_decay
    if state is not None:
        log_decay = log_decay + state.log_decay
    after = WKVState(log_scale, rows.sums[..., -1:, :], log_decay)
    return reference.mean(read.sums, v.shape[-1]).to(v.dtype), WKVState(*(x.to(v.dtype) for x in after))


def summarise(k: Tensor, v: Tensor, decay: Tensor, key_mask: Tensor | None) -> WKVState:
    """The state after some tokens that nothing precedes."""
    count = counts(k, key_mask)
    pool = reference.pooled(*reference.terms(k.double() + count * decay, v.double(), key_mask))
    log_decay = -count[..., -1:, :] * decay
    return WKVState(*(x.to(v.dtype) for x in (pool.log_scale + log_decay, pool.sums, log_decay)))


def combine(earlier: WKVState, later: WKVState) -> WKVState:
    """The state of neighbouring tokens; associative."""
    pool = reference.combined(
        Pool(earlier.log_scale + later.log_decay, earlier.sums), Pool(later.log_scale, later.sums)
    )
    return WKVState(*pool, earlier.log_decay + later.log_decay)


def one(
    k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, state: WKVState, key_mask: Tensor | None
) -> tuple[Tensor, WKVState]:
    """``streamed`` of one token: two sums of a state and a key."""
    scores, both = reference.terms(k, v, key_mask)
    read = reference.combined(Pool(*state[:2]), Pool(scores + bonus, both))
    log_decay = -decay * reference.visible_ones(k, key_mask)
    return reference.mean(read.sums, v.shape[-1]), combine(state, WKVState(scores, both, log_decay))
