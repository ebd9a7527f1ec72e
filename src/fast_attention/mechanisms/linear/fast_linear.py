"""Kernelised attention by the path that suits the call: all pairs of few tokens, chunks in cache, or plain sums."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch, numerics
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.recurrence import flat, masked_rows
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap, Features, Logs
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu
from fast_attention.mechanisms.linear import (
    fast_linear_causal,
    fast_linear_noncausal,
    in_range,
    linear_state,
    reference,
)
from fast_attention.mechanisms.linear.fast_linear_causal import divide, protected
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
        if numerics.finite(out):
            return out
        why = "outputs that are not finite in one scale"
    dispatch.record("plain sums", why)
    keys = reference.masked_keys(phi.features, k, key_mask)
    return in_range.attend(phi.features(q), keys, v, is_causal=is_causal, eps=eps)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None,
    *, keep: bool, phi: Elementwise, eps: float, is_causal: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    masked, shape = masked_rows(key_mask, k), (*q.shape[:-1], v.shape[-1])
    q, k, v = flat(q), flat(k), flat(v)
    queries, keys = (x.new_empty(x.shape) for x in (q, k))
    for x, features in ((q, queries), (k, keys)):
        phi.fill(x, features, torch.empty_like(features))
    if masked is not None:
        keys.masked_fill_(masked, 0.0)
        v = v.masked_fill(masked, 0.0)
    pairs = torch.bmm(queries, keys.mT)
    if is_causal:
        pairs.tril_(keys.shape[1] - q.shape[1])
    denominator, out = pairs.sum(-1, keepdim=True), torch.bmm(pairs, v)
    divide(out, denominator, eps, out, safe=protected(phi, eps))
    return out.view(shape), ((queries, keys, pairs, denominator) if keep else ())


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, phi: Elementwise, eps: float, is_causal: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, key_mask), (queries, keys, pairs, denominator) = inputs, kept
    masked, values = masked_rows(key_mask, k), flat(v)
    d_numerator = flat(gradients[0]) / denominator
    d_denominator = (d_numerator * flat(outputs[0])).sum(-1, keepdim=True)
    d_pairs = torch.baddbmm(d_denominator, d_numerator, values.mT, beta=-1)
    if is_causal:
        d_pairs.tril_(keys.shape[1] - queries.shape[1])
    if masked is not None:
        d_pairs.masked_fill_(masked.mT, 0.0)
    dq, dk, dv = torch.bmm(d_pairs, keys), torch.bmm(d_pairs.mT, queries), torch.bmm(pairs.mT, d_numerator)
    for x, features, gradient in ((flat(q), queries, dq), (flat(k), keys, dk)):
        phi.vjp(x, features.clone(), gradient, gradient)  # kept tensors outlive this call
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), None


def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: Elementwise, eps: float, is_causal: bool
) -> Tensor:
    keys = reference.masked_keys(phi.features, k, key_mask)
    return normalise(reference.attend(phi(q), keys, v, is_causal=is_causal), eps)


attention = CustomGradient(_plain, _forward, _backward)  # (q, k, v, key_mask, *, phi, eps, is_causal) -> outputs


def advance_few(
    q: Float[Tensor, "*batch n C"],
    k: Float[Tensor, "*batch n C"],
    v: Float[Tensor, "*batch n values"],
    state: LinearState | None,
    *,
    phi: FeatureMap,
    eps: float,
) -> tuple[Float[Tensor, "*batch n values"], LinearState]:
    """Outputs of new tokens behind ``state``, and the state after them, from features ``q`` and ``k`` of ``phi``."""
    batch, width, values = q.shape[:-2], k.shape[-1], v.shape[-1]
    several, queries, keys, v = q.shape[-2] > 1, flat(q), flat(k), flat(v)
    z = keys.sum(1, keepdim=True) if several else keys
    if state is None:
        before, kv = None, torch.bmm(keys.mT, v)
    else:
        before = state.kv.reshape(-1, width, values), state.k.reshape(-1, 1, width)
        kv, z = torch.baddbmm(before[0], keys.mT, v), before[1] + z
    if several:
        pairs = torch.bmm(queries, keys.mT).tril_()
        numerator, denominator = torch.bmm(pairs, v), pairs.sum(-1, keepdim=True)
        if before is not None:
            numerator = numerator + torch.bmm(queries, before[0])
            denominator = denominator + _products(queries, before[1])
    else:  # one token sees all
        numerator, denominator = torch.bmm(queries, kv), _products(queries, z)
    after, sum_of_keys = kv.view(*batch, width, values), z.view(*batch, width)
    log_scale = torch.zeros_like(sum_of_keys[..., :1]) if state is None else state.log_scale
    out = _quotient(numerator, denominator, eps, safe=protected(phi, eps))
    return out.view(*batch, -1, values), LinearState(after, sum_of_keys, log_scale)


def _products(q: Tensor, z: Tensor) -> Tensor:
    """``q . z``, (rows, L, 1): the vector on the left, which is the faster side."""
    return torch.bmm(z, q.mT).mT


def _quotient(numerator: Tensor, denominator: Tensor, eps: float, *, safe: bool) -> Float[Tensor, "rows length values"]:
    """Numerators over denominators plus ``eps``, zeros where that is too small; ``safe``: it never is."""
    denominator = numerics.nan_if_infinite(denominator + eps if eps else denominator)
    if safe:
        return numerator / denominator
    info = torch.finfo(denominator.dtype)
    nothing = denominator.abs() < info.tiny / info.eps
    return (numerator / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


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
        return attention(q, k, v, key_mask, phi=phi, eps=eps, is_causal=is_causal)
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
        if numerics.finite(out):
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
            return advance_few(queries.values, keys.values, v, state, phi=phi, eps=eps)
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
