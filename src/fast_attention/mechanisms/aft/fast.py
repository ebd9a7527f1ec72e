"""AFT-simple over all keys, and causal of few tokens, with hand-written gradients; what AFT's fast files share.

``sigmoid(q_i) * sum_j exp(k_j) v_j / sum_j exp(k_j)`` in chunks that stay in cache; the weights are computed again in
the backward pass. Masked keys arrive as ``scan.FLOOR`` and their values as zeros.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.chunks import RunningSum, chunks_of
from fast_attention.engine.numerics import exp_
from fast_attention.engine.operation import Fast, Operation, Tensors
from fast_attention.engine.scan import FLOOR
from fast_attention.mechanisms.aft import gpu
from fast_attention.mechanisms.aft.reference import gated_mean, gated_running_means, masked_scores

NUMBERS = 1 << 19  # of one operand that are worked on at a time: a few such operands fit the caches
SHORT = 256  # tokens up to which fewer calls count more than sums side by side
RANGE = 60.0  # the natural logarithm of the smallest sum that a log scale may leave; float32 ends at 87


def chunk_length(x: Tensor, multiple: int = 1) -> int:
    """Tokens, a multiple of ``multiple``, that make about ``NUMBERS`` numbers in all sequences together."""
    per_token = max(1, x.numel() // max(1, x.shape[-2]))
    return max(1, NUMBERS // (per_token * multiple)) * multiple


def log_scale(k: Tensor) -> Tensor:
    """The largest key of every channel (..., 1, D): above every masked one, also where all are masked."""
    return k.amax(-2, keepdim=True).clamp_(min=FLOOR / 2)


def smallest(k: Tensor) -> Tensor:
    """The smallest visible key of every channel (..., D); infinite where none is."""
    return k.masked_fill(k < FLOOR / 2, float("inf")).amin(-2)


def safe(denominators: Tensor, *, any_masked: bool) -> Tensor:
    """Denominators, in place, infinite where no key is visible (``any_masked``: possible): quotients become zero."""
    return denominators.masked_fill_(denominators == 0, float("inf")) if any_masked else denominators


def weigh(k: Tensor, v: Tensor, scale: Tensor, out: Tensor) -> None:
    """``exp(k - scale)`` times values and ones, into ``out`` (..., S, 2 D)."""
    numerators, denominators = out.split(v.shape[-1], -1)
    torch.mul(exp_(torch.sub(k, scale, out=denominators)), v, out=numerators)


def weigh_vjp(v: Tensor, weights: Tensor, d_terms: Tensor, dk: Tensor, dv: Tensor) -> None:
    """The gradients of ``weigh`` into ``dk`` and ``dv``, which may hold the weights."""
    d_numerators, d_denominators = d_terms.split(v.shape[-1], -1)
    torch.mul(v, d_numerators, out=dk).add_(d_denominators).mul_(weights)
    torch.mul(weights, d_numerators, out=dv)


def gate(q: Tensor, sums: Tensor, out: Tensor, *, any_masked: bool) -> Tensor:
    """``sigmoid(q)`` times numerators over denominators, into ``out``; returns the denominators."""
    numerators, denominators = sums.split(q.shape[-1], -1)
    torch.sigmoid(q, out=out).mul_(numerators).div_(safe(denominators, any_masked=any_masked))
    return denominators


def gate_vjp(q: Tensor, g: Tensor, out: Tensor, denominators: Tensor, dq: Tensor, d_sums: Tensor) -> None:
    """The gradients of ``gate`` into ``dq`` and ``d_sums``."""
    d_numerators, d_denominators = d_sums.split(q.shape[-1], -1)
    torch.sigmoid(q, out=dq)
    torch.div(g, denominators, out=d_denominators)
    torch.mul(d_denominators, dq, out=d_numerators)
    d_denominators.mul_(out).neg_()
    dq.neg_().add_(1.0).mul_(out).mul_(g)


def mean_of_all(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """AFT-simple over all visible keys."""
    return gated_mean(q, *hidden(k, v, key_mask))


def hidden(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values, at ``FLOOR`` and zero where masked."""
    return masked_scores(k, key_mask), masks.drop(v, key_mask)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (k, v), any_masked = hidden(k, v, key_mask), key_mask is not None
    scale, size = log_scale(k), chunk_length(k)
    if size >= k.shape[-2]:
        e = (k - scale).exp_()
        denominator = e.sum(-2, keepdim=True)
        mean = e.mul_(v).sum(-2, keepdim=True)
    else:
        mean, denominator = _sums(k, v, scale, size)
    denominator = safe(denominator, any_masked=any_masked)
    mean = mean.div_(denominator)
    if q.shape[-2] <= (size := chunk_length(q)):
        return q.sigmoid().mul_(mean), (scale, denominator, mean) if keep else ()
    out = torch.empty_like(q)
    for at in chunks_of(size, q.shape[-2]):
        torch.sigmoid(q[..., at, :], out=out[..., at, :]).mul_(mean)
    return out, (scale, denominator, mean) if keep else ()


def _sums(k: Tensor, v: Tensor, scale: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Numerators and denominators."""
    e = k.new_empty(*k.shape[:-2], size, k.shape[-1])
    numerator, denominator = RunningSum(), RunningSum()
    for at in chunks_of(size, k.shape[-2]):
        weights = exp_(torch.sub(k[..., at, :], scale, out=e[..., : at.stop - at.start, :]))
        denominator.add(weights)
        numerator.add(weights.mul_(v[..., at, :]))
    return numerator.row(k), denominator.row(k)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> Tensors:
    (q, k, v, key_mask), (scale, denominator, mean), (g,) = inputs, saved, gradients
    k, v = hidden(k, v, key_mask)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    total = torch.zeros_like(mean, dtype=torch.float64)
    for at in chunks_of(chunk_length(q), q.shape[-2]):
        gates, rows = torch.sigmoid(q[..., at, :]), dq[..., at, :]
        total += torch.mul(gates, g[..., at, :], out=rows).sum(-2, keepdim=True)
        rows.mul_(mean).mul_(gates.neg_().add_(1.0))  # out = gates * mean
    factor = total.to(k.dtype) / denominator
    for at in chunks_of(chunk_length(k), k.shape[-2]):
        weights = exp_(torch.sub(k[..., at, :], scale, out=dv[..., at, :])).mul_(factor)
        torch.sub(v[..., at, :], mean, out=dk[..., at, :]).mul_(weights)
    return dq, masks.drop(dk, key_mask), masks.drop(dv, key_mask), None


noncausal = Operation(
    mean_of_all,
    cpu=Fast(
        _forward, _backward, path="sums over all keys, chunk by chunk", why="every query sees the same keys"
    ),
    cuda=Fast(partial(gpu.attend, is_causal=False), None, serves=gpu.serves, halves=True),
    compute=torch.float32,
    path="sums over all keys",
)  # fmt: skip


def is_short(k: Tensor) -> bool:
    """Whether the keys (..., S, D) are few, and the first of every channel lies within ``RANGE`` of the largest."""
    return k.shape[-2] <= SHORT and bool((k.detach().amax(-2) - k.detach()[..., 0, :]).amax() <= RANGE)


def _short_forward(q: Tensor, k: Tensor, v: Tensor, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    scale, terms = log_scale(k), k.new_empty(*k.shape[:-1], 2 * v.shape[-1])
    weigh(k, v, scale, terms)
    numerators, denominators = terms.cumsum(-2).split(v.shape[-1], -1)
    return q.sigmoid().mul_(numerators).div_(denominators), (scale, denominators) if keep else ()


def _short_backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    (q, k, v), (out,), (scale, denominators), (g,) = inputs, outputs, saved, gradients
    dq, d_sums = torch.empty_like(q), g.new_empty(*g.shape[:-1], 2 * v.shape[-1])
    gate_vjp(q, g, out, denominators, dq, d_sums)
    d_numerators, d_denominators = d_sums.flip(-2).cumsum(-2).flip(-2).split(v.shape[-1], -1)
    weights = exp_(k - scale)
    dk = torch.addcmul(d_denominators, v, d_numerators).mul_(weights)
    return dq, dk, weights.mul_(d_numerators)


short_causal = Operation(gated_running_means, cpu=Fast(_short_forward, _short_backward))
