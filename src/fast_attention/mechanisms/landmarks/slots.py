"""Attention to slots: means of keys and of values, weighed by what each token writes into each slot; causal by sums.

The sums over tokens are those of linear attention: its features are the weights ``exp(a_js)`` of token j in slot s, its
values keys and values side by side. Every query reads them as they are at its own position, and no (tokens, slots,
width) is ever held: its products with the keys of its block are weighed first, and so are its weights of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.blocks import join, split
from fast_attention.engine.bounds import bounded
from fast_attention.engine.chunked import scan
from fast_attention.engine.opaque import Opaque, like_queries
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import Logs
from fast_attention.mechanisms.linear import linear_state
from fast_attention.mechanisms.linear.linear_state import LinearState

SLACK = 40.0  # how far above its log scale a weight may be: sums of e^40 and their gradients are numbers in float32
BLOCK = 64  # tokens of a block
FEW = 16  # tokens of a block where many go at once, and each query has log scales of its own


def summarise(k: Tensor, v: Tensor, rows: Tensor, key_mask: Tensor | None) -> LinearState:
    """The sums over keys and values (..., S, E) and (..., S, Ev), weighed by ``exp(w_s . k_j)`` with w in ``rows``."""
    return linear_state.summarise(_logits(k, rows, key_mask), torch.cat([k, v], -1))


def read(q: Tensor, state: LinearState) -> Tensor:
    """``softmax(q K~^T) V~``: outputs (..., L, Ev) of scaled queries, with all slots as they are in ``state``."""
    keys, values = _means(state, q.shape[-1])
    return (q @ keys.mT).softmax(-1) @ values


def advance(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, key_mask: Tensor | None, state: LinearState | None
) -> tuple[Tensor, LinearState]:
    """Outputs of new tokens with scaled queries, each with the slots as of its own position, and the sums after them.

    In blocks: products of matrices inside a block, the state before it for all earlier tokens.
    """
    if state is None:
        state = linear_state.empty(_logits(k[..., :1, :], rows, None), torch.cat([k, v], -1)[..., :1, :])
    if not symbolic() and q.shape[-2] == 1:
        dispatch.record("one token added to the slots", "decoding token by token")
        state = linear_state.combine(state, summarise(k, v, rows, key_mask))
        return read(q, state), state
    out, *after = _OPAQUE(q, k, v, rows, key_mask, *state)
    return out, LinearState(*after)


def _advance(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, key_mask: Tensor | None, *state: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    tokens, before = [q, k, v, None if key_mask is None else key_mask[..., None]], LinearState(*state)
    if why := dispatch.obstacle(q, k, v):
        dispatch.record("sums of slots, all blocks at once", why, block=FEW)
        (out,), after = _many_blocks(*_written(tokens, rows), before)
    elif q.shape[-2] <= BLOCK:
        dispatch.record("sums of slots, one block", "few tokens")
        (out,), after = _step(tokens, [rows], before)
    else:
        dispatch.record("sums of slots, block by block", "autograd follows one block at a time", block=BLOCK)
        (out,), after = scan(_step, tokens, [rows], before, size=BLOCK)
    return out, *after


def _empty(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, key_mask: Tensor | None, *state: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    return like_queries(q, k, v), *(x.new_empty(x.shape) for x in state)


_OPAQUE = Opaque(_advance, _empty)


def _step(
    tokens: Sequence[Any], weights: Sequence[Any], state: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    (q, k, v, logits), before = _written(tokens, weights[0]), LinearState(*state)
    if q.shape[-2] > BLOCK:  # a gradient that is differentiated again
        return _many_blocks(q, k, v, logits, before)
    after = linear_state.combine(before, linear_state.summarise(Logs(logits), torch.cat([k, v], -1)))
    first = torch.maximum(before.log_scale, logits.detach()[..., 0, :])
    far = bool((after.log_scale - first > SLACK).any())
    return (_block(q, k, v, logits, before, None if far else first),), after


def _written(tokens: Sequence[Any], rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and logits."""
    q, k, v, mask = tokens
    return q, k, v, _logits(k, rows, None if mask is None else mask[..., 0]).logs


def _many_blocks(
    q: Tensor, k: Tensor, v: Tensor, logits: Tensor, state: LinearState
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """All blocks at once, without a look at numbers: for traced code, other devices, second derivatives."""
    length, logits = q.shape[-2], split(logits, FEW, value=float("-inf"))
    q, k, v = (split(x, FEW) for x in (q, k, v))
    highest = torch.cat([state.log_scale[..., None, :], logits.detach().amax(-2)], -2)
    log_scales = cummax(highest.clamp_min(FLOOR))
    written = (logits - log_scales[..., 1:, None, :]).exp()
    sums = written.mT @ torch.cat([k, v], -1), written.sum(-2)
    kv, total = linear_state.prefixes(state, *sums, log_scales)
    before = LinearState(kv[..., :-1, :, :], total[..., :-1, :], log_scales[..., :-1, :])
    out = join(_block(q, k, v, logits, before, None), length)
    return (out,), (kv[..., -1, :, :], total[..., -1, :], log_scales[..., -1, :])


def _block(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, before: LinearState, log_scale: Tensor | None) -> Tensor:
    """Outputs of the tokens (..., n, E) of a block behind a state.

    ``log_scale`` (..., m), that of the first token or of those before, serves where no logit is far above. None: every
    query has its own, the largest logits up to it, so that no later token makes earlier ones vanish.
    """
    pairs = (q @ k.mT).tril()
    if log_scale is not None:
        scale = log_scale[..., None, :]
        weights = (logits - scale).exp()
        total, scores = weights.cumsum(-2), pairs @ weights
    else:
        later = torch.ones(pairs.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scale = torch.maximum(cummax(logits.detach()), before.log_scale[..., None, :])
        weights = (logits[..., None, :, :] - scale[..., :, None, :]).masked_fill(later[..., None], float("-inf")).exp()
        total, scores = weights.sum(-2), (pairs[..., None] * weights).sum(-2)
    earlier = before.k[..., None, :] * (before.log_scale[..., None, :] - scale).exp()
    inverse = _inverse(total + earlier)
    earlier = earlier * inverse  # the fraction of a slot that was written before the block
    keys, values = _means(before, q.shape[-1])
    slots = (q @ keys.mT * earlier + scores * inverse).softmax(-1)
    share = slots * inverse
    if log_scale is not None:
        pairs = (share @ weights.mT).tril()
    else:
        pairs = (weights * share[..., None, :]).sum(-1)
    return slots * earlier @ values + pairs @ v


def _logits(k: Tensor, rows: Tensor, key_mask: Tensor | None) -> Logs:
    """``w_s . k_j`` (..., S, m), minus infinity for tokens that are masked."""
    logits = bounded(k) @ rows.mT.to(k.dtype)
    return Logs(logits if key_mask is None else logits.masked_fill(~key_mask[..., None], float("-inf")))


def _means(state: LinearState, width: int) -> tuple[Tensor, Tensor]:
    """The keys and the values of all slots; zeros where nothing was written."""
    means = state.kv * _inverse(state.k)[..., None]
    keys, values = means.split([width, means.shape[-1] - width], -1)
    return keys, values


def _inverse(total: Tensor) -> Tensor:
    """``1 / total``, and 1 where nothing was written."""
    return total.masked_fill(total == 0.0, 1.0).reciprocal()
