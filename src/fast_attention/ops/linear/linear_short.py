"""Kernelised attention of a few tokens, and one token of decoding: as few operations as possible."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.ops.linear.linear import LinearState, Sums
from fast_attention.ops.linear.linear_blocks import flat

PAIRS = 64  # tokens up to which all pairs cost no more than a state


def attend(
    q: Float[Tensor, "*batch length C"],
    k: Float[Tensor, "*batch keys C"],
    v: Float[Tensor, "*batch keys values"],
    *,
    is_causal: bool,
) -> Sums:
    """Sums from features, without batch axes but one: (rows, L, Ev) and (rows, L, 1)."""
    q, k, v = flat(q), flat(k), flat(v)
    if is_causal or max(q.shape[1], k.shape[1]) <= PAIRS:
        pairs = torch.bmm(q, k.mT)
        if is_causal:
            pairs = pairs.tril_(k.shape[1] - q.shape[1])
        return Sums(torch.bmm(pairs, v), pairs.sum(-1, keepdim=True))
    return Sums(torch.bmm(q, torch.bmm(k.mT, v)), _products(q, k.sum(1, keepdim=True)))


def advance(
    q: Float[Tensor, "*batch n C"],
    k: Float[Tensor, "*batch n C"],
    v: Float[Tensor, "*batch n values"],
    state: LinearState | None,
) -> tuple[Sums, LinearState]:
    """Causal sums of a stretch that follows ``state``, shaped as ``attend`` has them, and the state after it."""
    batch, width, values = q.shape[:-2], k.shape[-1], v.shape[-1]
    several, queries, keys, here = q.shape[-2] > 1, flat(q), flat(k), flat(v)
    z = keys.sum(1, keepdim=True) if several else keys
    if state is None:
        before, kv = None, torch.bmm(keys.mT, here)
    else:
        before = state.kv.reshape(-1, width, values), state.k.reshape(-1, 1, width)
        kv, z = torch.baddbmm(before[0], keys.mT, here), before[1] + z
    sums = attend(q, k, v, is_causal=True) if several else _read(queries, (kv, z))  # one token sees all
    if several and before is not None:
        sums = Sums(*(a + b for a, b in zip(sums, _read(queries, before), strict=True)))
    after, sum_of_keys = kv.view(*batch, width, values), z.view(*batch, width)
    top = torch.zeros_like(sum_of_keys[..., 0]) if state is None else state.top
    return sums, LinearState(after, sum_of_keys, top)


def quotient(sums: Sums, eps: float, *, positive: bool) -> Float[Tensor, "rows length values"]:
    """Numerators over denominators plus ``eps``, zeros where that is too small; ``positive``: it never is."""
    numerator, denominator = sums
    info = torch.finfo(denominator.dtype)
    denominator = denominator + eps if eps else denominator
    if positive and eps >= info.tiny / info.eps:
        return numerator / denominator
    nothing = denominator.abs() < info.tiny / info.eps
    return (numerator / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def _read(q: Tensor, state: tuple[Tensor, Tensor]) -> Sums:
    return Sums(torch.bmm(q, state[0]), _products(q, state[1]))


def _products(q: Tensor, z: Tensor) -> Tensor:
    """``q . z``, (rows, L, 1): the vector on the left, which is the faster side."""
    return torch.bmm(z, q.mT).mT
