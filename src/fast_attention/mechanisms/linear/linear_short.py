"""Kernelised attention of a few tokens by all their pairs, and one token of decoding: as few operations as possible."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import overflow
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.feature_maps.feature_map import Elementwise
from fast_attention.mechanisms.linear import linear
from fast_attention.mechanisms.linear.linear import LinearState, Sums
from fast_attention.mechanisms.linear.linear_blocks import divide, flat, hidden_rows, protected


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None,
    *, keep: bool, phi: Elementwise, eps: float, is_causal: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    hidden, shape = hidden_rows(key_mask, k), (*q.shape[:-1], v.shape[-1])
    q, k, v = flat(q), flat(k), flat(v)
    queries, keys = (x.new_empty(x.shape) for x in (q, k))
    for x, made in ((q, queries), (k, keys)):
        phi.fill(x, made, torch.empty_like(made))
    if hidden is not None:
        keys.masked_fill_(hidden, 0.0)
        v = v.masked_fill(hidden, 0.0)
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
    hidden, values = hidden_rows(key_mask, k), flat(v)
    up = flat(gradients[0]) / denominator
    down = (up * flat(outputs[0])).sum(-1, keepdim=True)
    weights = torch.baddbmm(down, up, values.mT, beta=-1)
    if is_causal:
        weights.tril_(keys.shape[1] - queries.shape[1])
    if hidden is not None:
        weights.masked_fill_(hidden.mT, 0.0)
    found = torch.bmm(weights, keys), torch.bmm(weights.mT, queries), torch.bmm(pairs.mT, up)
    for x, made, gradient in ((flat(q), queries, found[0]), (flat(k), keys, found[1])):
        phi.chain(x, made.clone(), gradient, gradient)  # kept tensors outlive this call
    return found[0].view(q.shape), found[1].view(k.shape), found[2].view(v.shape), None


def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: Elementwise, eps: float, is_causal: bool
) -> Tensor:
    keys = linear.masked_keys(phi.features, k, key_mask)
    return linear.normalise(linear.attend(phi(q), keys, v, is_causal=is_causal), eps)


attention = CustomGradient(_plain, _forward, _backward)  # (q, k, v, key_mask, *, phi, eps, is_causal) -> outputs


def advance(
    q: Float[Tensor, "*batch n C"],
    k: Float[Tensor, "*batch n C"],
    v: Float[Tensor, "*batch n values"],
    state: LinearState | None,
) -> tuple[Sums, LinearState]:
    """Causal sums of a stretch that follows ``state``, (rows, n, Ev) and (rows, n, 1), and the state after it."""
    batch, width, values = q.shape[:-2], k.shape[-1], v.shape[-1]
    several, queries, keys, here = q.shape[-2] > 1, flat(q), flat(k), flat(v)
    z = keys.sum(1, keepdim=True) if several else keys
    if state is None:
        before, kv = None, torch.bmm(keys.mT, here)
    else:
        before = state.kv.reshape(-1, width, values), state.k.reshape(-1, 1, width)
        kv, z = torch.baddbmm(before[0], keys.mT, here), before[1] + z
    sums = _within(queries, keys, here) if several else _read(queries, (kv, z))  # one token sees all
    if several and before is not None:
        sums = Sums(*(a + b for a, b in zip(sums, _read(queries, before), strict=True)))
    after, sum_of_keys = kv.view(*batch, width, values), z.view(*batch, width)
    top = torch.zeros_like(sum_of_keys[..., :1]) if state is None else state.top
    return sums, LinearState(after, sum_of_keys, top)


def quotient(sums: Sums, eps: float, *, safe: bool) -> Float[Tensor, "rows length values"]:
    """Numerators over denominators plus ``eps``, zeros where that is too small; ``safe``: it never is."""
    numerator, denominator = sums
    denominator = overflow.nan_if_infinite(denominator + eps if eps else denominator)
    if safe:
        return numerator / denominator
    info = torch.finfo(denominator.dtype)
    nothing = denominator.abs() < info.tiny / info.eps
    return (numerator / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def _within(q: Tensor, k: Tensor, v: Tensor) -> Sums:
    """Causal sums of flat features and values, (rows, L, Ev) and (rows, L, 1)."""
    pairs = torch.bmm(q, k.mT).tril_()
    return Sums(torch.bmm(pairs, v), pairs.sum(-1, keepdim=True))


def _read(q: Tensor, state: tuple[Tensor, Tensor]) -> Sums:
    return Sums(torch.bmm(q, state[0]), _products(q, state[1]))


def _products(q: Tensor, z: Tensor) -> Tensor:
    """``q . z``, (rows, L, 1): the vector on the left, which is the faster side."""
    return torch.bmm(z, q.mT).mT
