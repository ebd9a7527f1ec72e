"""AFT-full in blocks of queries: ``sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)``, both ways.

The values of all sequences lie side by side, so that a block of queries is one wide product of exp(w) with exp(k) v and
exp(k). Causal blocks multiply with the keys up to their own end only. There all queries share one unit per channel, for
keys that never rise far above what the first of them saw (``steady``); other keys take ``biased.full_causal``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.exponential import exp_
from fast_attention.engine.opaque import Opaque
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import traced
from fast_attention.mechanisms.aft import biased, pool
from fast_attention.mechanisms.aft.pool_passes import filled, pieces, unit
from fast_attention.mechanisms.aft.prefix_pool import lowest

ROWS = 256  # queries per product
RANGE = 40.0  # keys may rise by this, and biases differ by this: sums stay above exp(-80), float32 ends at exp(-87)


def steady(k: Tensor, bias: Tensor, *, holes: bool) -> bool:
    """Whether one unit per channel serves every causal query, and no unit of the biases is needed beside it."""
    if k.shape[-2] == 0:
        return True
    rise = (k.amax(-2) - (lowest(k) if holes else k[..., 0, :])).amax()
    low, high = bias.detach().aminmax()
    return bool((rise <= RANGE) & (high - low <= RANGE))


def weighed(k: Tensor, v: Tensor, top: Tensor, out: Tensor) -> None:
    """``exp(k - top)`` times values and ones, into ``out`` (..., S, 2 D)."""
    above, below = out.split(v.shape[-1], -1)
    torch.mul(exp_(torch.sub(k, top, out=below)), v, out=above)


def gated(q: Tensor, sums: Tensor, out: Tensor, *, holes: bool) -> Tensor:
    """``sigmoid(q)`` times numerators over denominators, into ``out``; returns the denominators."""
    above, below = sums.split(q.shape[-1], -1)
    torch.sigmoid(q, out=out).mul_(above).div_(filled(below, holes=holes))
    return below


def ungated(q: Tensor, g: Tensor, out: Tensor, below: Tensor, dq: Tensor, sums: Tensor) -> None:
    """The reverse of ``gated``: the gradients by the queries, into ``dq``, and by the sums, into ``sums``."""
    above, under = sums.split(q.shape[-1], -1)
    torch.sigmoid(q, out=dq)
    torch.div(g, below, out=under)
    torch.mul(under, dq, out=above)
    under.mul_(out).neg_()
    dq.neg_().add_(1.0).mul_(out).mul_(g)


def unweighed(v: Tensor, terms: Tensor, owed: Tensor, dk: Tensor, dv: Tensor) -> None:
    """The reverse of ``weighed``: gradients by keys and values, out of ``terms`` and the gradient by them."""
    above, below = owed.split(v.shape[-1], -1)
    e = terms[..., v.shape[-1] :]
    torch.mul(v, above, out=dk).add_(below).mul_(e)
    torch.mul(e, above, out=dv)


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, holes: bool, longest: int) -> Tensor:
    both = torch.cat([v, (k > FLOOR / 2).to(v.dtype)], -1)
    if is_causal:
        sums = biased.full_causal(bias, k, both, longest=longest)
    else:
        sums = biased.full(bias, k, both)
    return q.sigmoid() * pool.mean(sums, v.shape[-1])


def _terms(k: Tensor, v: Tensor) -> Tensor:
    """(S, ..., 2 D)."""
    terms = k.new_empty(k.shape[-2], *k.shape[:-2], 2 * v.shape[-1])
    weighed(k, v, unit(k), terms.movedim(0, -2))
    return terms


def _weights(bias: Tensor, now: slice, is_causal: bool, buffer: Tensor) -> Tensor:
    rows = bias[now, : now.stop] if is_causal else bias[now]
    weights = buffer[: rows.numel()].view(rows.shape)
    exp_(torch.sub(rows, rows.amax(-1, keepdim=True), out=weights))
    if is_causal:
        weights[:, now.start :].tril_()
    return weights


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, keep: bool, is_causal: bool, holes: bool, longest: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    terms, out = _terms(k, v), torch.empty_like(q)
    flat = terms.flatten(1)
    kept = torch.empty_like(q) if keep else None
    sums = k.new_empty(min(ROWS, q.shape[-2]), *terms.shape[1:])
    buffer = k.new_empty(len(sums) * k.shape[-2])
    for now in pieces(q.shape[-2], ROWS):
        weights, part = _weights(bias, now, is_causal, buffer), sums[: now.stop - now.start]
        torch.mm(weights, flat[: weights.shape[1]], out=part.flatten(1))
        below = gated(q[..., now, :], part.movedim(0, -2), out[..., now, :], holes=holes)
        if kept is not None:
            kept[..., now, :] = below
    return out, () if kept is None else (kept,)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, is_causal: bool, holes: bool, longest: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, bias), (out,), (below,), (g,) = inputs, outputs, kept, gradients
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    by_bias = torch.zeros_like(bias) if bias.requires_grad else None
    terms = _terms(k, v)
    flat, owed = terms.flatten(1), torch.zeros_like(terms)
    sums = k.new_empty(min(ROWS, q.shape[-2]), *terms.shape[1:])
    buffer = k.new_empty(len(sums) * k.shape[-2])
    for now in pieces(q.shape[-2], ROWS):
        weights, part = _weights(bias, now, is_causal, buffer), sums[: now.stop - now.start]
        seen = weights.shape[1]
        own, grad, made, under, found = (x[..., now, :] for x in (q, g, out, below, dq))
        ungated(own, grad, made, under, found, part.movedim(0, -2))
        owed.flatten(1)[:seen].addmm_(weights.mT, part.flatten(1))
        if by_bias is not None:
            torch.mm(part.flatten(1), flat[:seen].mT, out=by_bias[now, :seen]).mul_(weights)
    unweighed(v, terms.movedim(0, -2), owed.movedim(0, -2), dk, dv)
    return dq, dk, dv, by_bias


_full = CustomGradient(_plain, _forward, _backward)


def full(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, holes: bool, longest: int) -> Tensor:
    """AFT-full of as many queries as keys where causal; masked keys at ``scan.FLOOR``, masked values zero.

    ``longest`` as in ``biased.full_causal``.
    """
    return _OPAQUE(q, k, v, bias, is_causal, holes, longest)[0]


def _parts(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, is_causal: int, holes: int, longest: int) -> tuple[Tensor]:
    return (_chosen(q, k, v, bias, is_causal=bool(is_causal), holes=bool(holes), longest=longest),)


_OPAQUE = Opaque(_parts, lambda q, k, v, *others: (v.new_empty(*q.shape[:-1], v.shape[-1]),))


def _chosen(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, holes: bool, longest: int) -> Tensor:
    if is_causal and not traced() and not steady(k, bias, holes=holes):
        dispatch.record("triangles of products by halving", "causal, and keys or biases lie too far apart for one unit")
        return _plain(q, k, v, bias, is_causal=True, holes=holes, longest=longest)
    dispatch.record("products of blocks of queries with all that they see", "every pair has a bias", rows=ROWS)
    return _full(q, k, v, bias, is_causal=is_causal, holes=holes, longest=longest)
