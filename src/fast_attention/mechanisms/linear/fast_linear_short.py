"""Kernelised attention of a few tokens by all their pairs, and of few new ones when decoding, in few operations."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import overflow
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.recurrence import flat, masked_rows
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap
from fast_attention.mechanisms.linear import reference
from fast_attention.mechanisms.linear.fast_linear_chunks import divide, protected
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise


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


def advance(
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
    denominator = overflow.nan_if_infinite(denominator + eps if eps else denominator)
    if safe:
        return numerator / denominator
    info = torch.finfo(denominator.dtype)
    nothing = denominator.abs() < info.tiny / info.eps
    return (numerator / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
