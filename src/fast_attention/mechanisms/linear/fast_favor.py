"""Attention from random features by the path that suits the call: chunk by chunk, or plain sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.bounds import bounded
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.recurrence import flat
from fast_attention.mechanisms.linear import (
    fast_favor_causal,
    fast_favor_chunks,
    fast_favor_noncausal,
    favor_gpu,
    gpu,
    linear_state,
    reference,
)
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

SHORT, SHORT_CAUSAL = 64, 128  # tokens up to which chunks cost more than they save


def attend(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Outputs (..., L, Ev) for queries (..., L, d), keys (..., S, d), values (..., S, Ev) and rows (..., m, d)."""
    settings: Any = {"is_causal": is_causal, "key_mask": key_mask}
    if why := favor_gpu.obstacle(phi, q, k, v, heads, masked=key_mask is not None):
        dispatch.unserved(q, why)
        return _attend(phi, q, k, v, heads, **settings)
    return favor_gpu.attend(phi, q, k, v, heads, **settings)


@in_float32
def _attend(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """``attend`` without kernels for GPUs."""
    if is_causal and phi.exponential:
        return _positive_causal(q, k, v, key_mask, *heads, hyperbolic=phi.pairs)
    return _chosen(phi, q, k, v, heads, is_causal=is_causal, key_mask=key_mask)


@opaque(like_queries)
def _positive_causal(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: Tensor, bias: Tensor | None,
    key_rows: Tensor | None, *, hyperbolic: bool,
) -> Tensor:  # fmt: skip
    """Chunks that look at numbers, which a compiler would have feature by feature."""
    phi = RandomFeatureMap("hyperbolic" if hyperbolic else "positive")
    return _chosen(phi, q, k, v, Heads(rows, bias, key_rows), is_causal=True, key_mask=key_mask)


def _chosen(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    why = _against(phi, q, k, is_causal=is_causal)
    if why:
        dispatch.record("features of the whole sequence at once", why)
        return _plain(q, k, v, key_mask, *heads, phi=phi, is_causal=is_causal)
    extra = q.shape[-2] - k.shape[-2] if is_causal else 0
    if extra > 0:  # the first queries see nothing
        out = _chosen(phi, q[..., extra:, :], k, v, heads, is_causal=True, key_mask=key_mask)
        return F.pad(out, (0, 0, extra, 0))
    lead, tensors = _flat(q, k, v, heads, key_mask)
    if is_causal:
        size = fast_favor_chunks.tokens(phi, heads.rows)
        dispatch.record("features chunk by chunk, with a running state", "causal", chunk=size)
    else:
        dispatch.record("features block by block", "every query sees all keys", block=fast_favor_noncausal.TOKENS)
    out = CAUSAL(*tensors, *_begin(phi, tensors), phi=phi)[0] if is_causal else NONCAUSAL(*tensors, phi=phi)
    return out.reshape(*lead, *out.shape[-2:])


def advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Causal outputs of new tokens behind ``state``, and the state after them."""
    if why := favor_gpu.obstacle(phi, q, k, v, heads, masked=key_mask is not None) or gpu.few(q, k, v, state, *heads):
        dispatch.unserved(q, why)
        return _advance(phi, q, k, v, heads, state, key_mask)
    return favor_gpu.advance(phi, q, k, v, heads, state, key_mask)


@in_float32
def _advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """``advance`` without kernels for GPUs."""
    if _against(phi, q, k, is_causal=True):
        if q.shape[-2] == 1 and state is not None and key_mask is None:
            return _step(phi, q, k, v, heads, state)
        keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, key_mask)
        sums, state = reference.advance(phi.plain(q, heads).free, keys, v, state)
        return normalise(sums), state
    lead, tensors = _flat(q, k, v, heads, key_mask)
    first = _begin(phi, tensors)
    if state is not None:
        first = tuple(x.reshape(like.shape) for x, like in zip(state, first, strict=True))
    out, *after = CAUSAL(*tensors, *first, phi=phi)
    out, G, g, log_scale = (x.reshape(*lead, *x.shape[-2:]) for x in (out, *after))
    return out, LinearState(G, g[..., 0, :], log_scale[..., 0, :])


def _step(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState
) -> tuple[Tensor, LinearState]:
    """One token: features of query and key together, one pass to rescale the state and add to it, one to read it."""
    if heads.key_rows is None:
        both = phi.plain(torch.cat([q, k], -2), heads)
        queries, keys = reference.sliced(both, slice(0, 1)), reference.sliced(both, slice(1, 2))
    else:
        queries, keys = phi.plain(q, heads), phi.plain(k, heads.keys)
    sums, state = reference.step(queries.free, keys, v, state)
    return normalise(sums), state


def _against(phi: RandomFeatureMap, q: Tensor, k: Tensor, *, is_causal: bool) -> str:
    """Why chunks would not do; empty where they do."""
    if why := dispatch.obstacle(q, k):
        return why
    if is_causal and not phi.exponential:  # sums that cancel would show by which scale a later key makes them go
        return "causal sums of features of either sign"
    short = SHORT_CAUSAL if is_causal else SHORT
    return f"at most {short} tokens" if max(q.shape[-2], k.shape[-2]) <= short else ""


def _flat(q: Tensor, k: Tensor, v: Tensor, heads: Heads, key_mask: Tensor | None) -> tuple[torch.Size, Any]:
    """The leading sizes, and all tensors with these as one: q, k, v, mask, and the weights of the heads."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, heads.rows)))
    tensors, weights = (
        [None if x is None else flat(x.expand(*lead, -1, -1)) for x in each]
        for each in ((bounded(q), bounded(k), v), heads)
    )
    mask = None if key_mask is None else key_mask.expand(*lead, k.shape[-2]).reshape(-1, k.shape[-2])
    return lead, (*tensors, mask, *weights)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *weights: Any, phi: RandomFeatureMap, is_causal: bool
) -> Tensor:
    heads = Heads(*weights)
    keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, mask)
    return normalise(reference.attend(phi.plain(q, heads).free, keys, v, is_causal=is_causal))


def _begin(phi: RandomFeatureMap, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The state before the first key of flat heads: sums (N, C, Ev) and (N, 1, C), and log scales."""
    (q, _, v), rows = tensors[:3], tensors[4]
    count, width = len(q), phi.width(rows)
    sums = q.new_zeros(count, width, v.shape[-1]), q.new_zeros(count, 1, width)
    return *sums, phi.first_log_scale(q, count, rows)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *others: Any, phi: RandomFeatureMap
) -> tuple[Tensor, ...]:
    """What the chunks compute, in operations that autograd follows; all queries see the first of more keys."""
    heads, (G, g, log_scale), extra = Heads(*others[:3]), others[3:], k.shape[-2] - q.shape[-2]
    state = LinearState(G, g[..., 0, :], log_scale[..., 0, :])
    keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, mask)
    if extra:
        first, keys = reference.sliced(keys, slice(0, extra)), reference.sliced(keys, slice(extra, None))
        state = linear_state.combine(state, linear_state.summarise(first, v[..., :extra, :]))
    sums, state = reference.advance(phi.plain(q, heads).free, keys, v[..., extra:, :], state)
    return normalise(sums), state.kv, state.k[..., None, :], state.log_scale[..., None, :]


NONCAUSAL = CustomGradient(
    lambda *x, phi: _plain(*x, phi=phi, is_causal=False), fast_favor_noncausal.forward, fast_favor_noncausal.backward
)
CAUSAL = CustomGradient(_causal, fast_favor_causal.forward, fast_favor_causal.backward)
