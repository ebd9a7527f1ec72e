"""Kernelised attention by the path that suits the call: all pairs of few tokens, chunks in cache, or plain sums."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch, overflow
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap, Features, Logs
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu
from fast_attention.mechanisms.linear import (
    fast_linear_causal,
    fast_linear_noncausal,
    fast_linear_short,
    in_range,
    linear_state,
    reference,
)
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise

MAPS = EluPlusOne(), Relu()  # one operation for compilers, whose graphs on disk hold numbers of this list
PAIRS = 64  # tokens up to which all pairs cost no more than a state
SHORT = 256  # tokens up to which chunks, causal, have more operations than they save work


def attend(
    q: Float[Tensor, "*batch length width"], k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"], key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool,
) -> Float[Tensor, "*batch length values"]:  # fmt: skip
    """``phi(q_i)^T S / (phi(q_i)^T z + eps)``, ``S`` and ``z`` over the keys that query i may see; zeros for none."""
    if phi in MAPS:
        number = [phi == one for one in MAPS].index(True)
        return _known(q, k, v, key_mask, number=number, is_causal=is_causal, eps=float(eps))
    return _in_range(q, k, v, key_mask, phi=phi, eps=eps, is_causal=is_causal)


@opaque(like_queries)
def _known(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, number: int, is_causal: bool, eps: float
) -> Tensor:
    return _in_range(q, k, v, key_mask, phi=MAPS[number], eps=eps, is_causal=is_causal)


def _in_range(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    why = dispatch.obstacle(q, k, v, even=True)
    if not why:
        out = _attend(q, k, v, key_mask, phi=phi, eps=eps, is_causal=is_causal)
        if overflow.finite(out):
            return out
        why = "outputs that are not finite in one scale"
    dispatch.record("plain sums", why)
    keys = reference.masked_keys(phi.features, k, key_mask)
    return in_range.attend(phi.features(q), keys, v, is_causal=is_causal, eps=eps)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    if not isinstance(phi, Elementwise):
        keys, queries = reference.masked_keys(phi.features, k, key_mask), phi.features(q)
        if in_range.has_scale(keys):
            dispatch.record("plain sums", "every key has a scale of its own", chunk=reference.CHUNK)
            return normalise(reference.attend(queries.free, keys, v, is_causal=is_causal))
        assert isinstance(keys, Features)
        assert isinstance(queries, Features)
        q, k, key_mask, phi = queries.values, keys.values, None, Identity()
    length, extra = q.shape[-2], k.shape[-2] - q.shape[-2]
    few = SHORT if is_causal else PAIRS
    if max(length, length + extra) <= few:
        dispatch.record("all pairs at once", f"no more than {few} tokens")
        return fast_linear_short.attention(q, k, v, key_mask, phi=phi, eps=eps, is_causal=is_causal)
    if not is_causal:
        dispatch.record("one state, blocks in cache", "every query sees every key", chunk=fast_linear_noncausal.TILE)
        return fast_linear_noncausal.attention(q, k, v, key_mask, phi=phi, eps=eps)
    dispatch.record("chunked causal sums, blocks in cache", "causal", chunk=fast_linear_causal.TILE)
    if extra < 0:  # the first queries see nothing
        out = _attend(q[..., -extra:, :], k, v, key_mask, phi=phi, eps=eps, is_causal=True)
        return F.pad(out, (0, 0, -extra, 0))
    state = None, None
    if extra > 0:  # every query sees the first keys
        mask = None if key_mask is None else key_mask[..., :extra]
        first = reference.masked_keys(phi.features, k[..., :extra, :], mask)
        state = linear_state.summarise(first, v[..., :extra, :])[:2]
        k, v, key_mask = k[..., extra:, :], v[..., extra:, :], None if key_mask is None else key_mask[..., extra:]
    return fast_linear_causal.attention(q, k, v, key_mask, *state, phi=phi, eps=eps)[0]


def advance(
    q: Float[Tensor, "*batch n width"], k: Float[Tensor, "*batch n width"], v: Float[Tensor, "*batch n values"],
    key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Outputs of new tokens behind ``state``, and the state after them."""
    why = dispatch.obstacle(q, k, v, even=True)
    if not why and (state is None or state.log_scale.count_nonzero().item() == 0):
        out, after = _advance(q, k, v, key_mask, state, phi=phi, eps=eps)
        if overflow.finite(out):
            return out, after
    dispatch.record("plain sums", why or "large keys that need rescaling", chunk=reference.CHUNK)
    return in_range.advance(
        phi.features(q), reference.masked_keys(phi.features, k, key_mask), v, state, eps=eps
    )  # fmt: skip


def _advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState]:
    length = q.shape[-2]
    if length <= SHORT or not isinstance(phi, Elementwise):
        keys, queries = reference.masked_keys(lambda x: _features(phi, x), k, key_mask), _features(phi, q)
        if in_range.has_scale(keys):
            dispatch.record("plain sums", "every key has a scale of its own", chunk=reference.CHUNK)
            return in_range.advance(queries, keys, v, state)
        assert isinstance(keys, Features)
        assert isinstance(queries, Features)
        if length <= SHORT:
            dispatch.record("one masked product", f"no more than {SHORT} tokens")
            return fast_linear_short.advance(queries.values, keys.values, v, state, phi=phi, eps=eps)
        q, k, key_mask, phi = queries.values, keys.values, None, Identity()
    dispatch.record("chunked causal sums, blocks in cache", "many new tokens", chunk=fast_linear_causal.TILE)
    kv, z = (None, None) if state is None else state[:2]
    out, kv, z = fast_linear_causal.attention(q, k, v, key_mask, kv, z, phi=phi, eps=eps)
    return out, LinearState(kv, z, torch.zeros_like(z[..., :1]))


def _features(phi: FeatureMap, x: Tensor) -> Features | Logs:
    """``phi.features(x)``, in place where no gradient is asked for."""
    if not isinstance(phi, Elementwise) or (x.requires_grad and torch.is_grad_enabled()):
        return phi.features(x)
    features = torch.empty_like(x)
    phi.fill(x, features, torch.empty_like(x))
    return Features(features)
