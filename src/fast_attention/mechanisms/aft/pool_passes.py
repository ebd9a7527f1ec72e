"""AFT-simple in blocks that stay in the cache: ``sigmoid(q_i) * sum_j exp(k_j) v_j / sum_j exp(k_j)``, both ways.

The weights are taken again in the backward pass. Masked keys arrive as ``scan.FLOOR`` and their values as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.exponential import exp_
from fast_attention.engine.scan import FLOOR
from fast_attention.mechanisms.aft import pool

ELEMENTS = 1 << 19  # numbers of one operand that are worked on at a time: a few such operands fit the caches


def block_length(x: Tensor, multiple: int = 1) -> int:
    """Tokens, a multiple of ``multiple``, that make about ``ELEMENTS`` numbers in all sequences together."""
    per_token = max(1, x.numel() // max(1, x.shape[-2]))
    return max(1, ELEMENTS // (per_token * multiple)) * multiple


def pieces(length: int, size: int) -> Iterator[slice]:
    """Stretches of at most ``size`` tokens."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def unit(k: Tensor) -> Tensor:
    """The largest key of every channel (..., 1, D): above every masked one, also where all are masked."""
    return k.amax(-2, keepdim=True).clamp_(min=FLOOR / 2)


def filled(denominators: Tensor, *, holes: bool) -> Tensor:
    """Denominators, in place, infinite where nothing was seen (``holes``: this can be): quotients become zero."""
    return denominators.masked_fill_(denominators == 0, float("inf")) if holes else denominators


def _plain(q: Tensor, k: Tensor, v: Tensor, *, holes: bool) -> Tensor:
    both = torch.cat([v, (k > FLOOR / 2).to(v.dtype)], -1)
    return q.sigmoid() * pool.mean(pool.pooled(k, both).sums, v.shape[-1])


def _forward(q: Tensor, k: Tensor, v: Tensor, *, keep: bool, holes: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    top, size = unit(k), block_length(k)
    if size >= k.shape[-2]:
        e = (k - top).exp_()
        below = e.sum(-2, keepdim=True)
        row = e.mul_(v).sum(-2, keepdim=True)
    else:
        row, below = _sums(k, v, top, size)
    below = filled(below, holes=holes)
    row = row.div_(below)
    if q.shape[-2] <= (size := block_length(q)):
        return q.sigmoid().mul_(row), (top, below, row) if keep else ()
    out = torch.empty_like(q)
    for now in pieces(q.shape[-2], size):
        torch.sigmoid(q[..., now, :], out=out[..., now, :]).mul_(row)
    return out, (top, below, row) if keep else ()


def _sums(k: Tensor, v: Tensor, top: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Numerators and denominators, the blocks' sums summed in float64."""
    e = k.new_empty(*k.shape[:-2], size, k.shape[-1])
    above, below = (torch.zeros_like(top, dtype=torch.float64) for _ in range(2))
    for now in pieces(k.shape[-2], size):
        weights = exp_(torch.sub(k[..., now, :], top, out=e[..., : now.stop - now.start, :]))
        below += weights.sum(-2, keepdim=True)
        above += weights.mul_(v[..., now, :]).sum(-2, keepdim=True)
    return above.to(k.dtype), below.to(k.dtype)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, holes: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    (q, k, v), _, (top, below, row), (g,) = inputs, outputs, kept, gradients
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    total = torch.zeros_like(row, dtype=torch.float64)
    for now in pieces(q.shape[-2], block_length(q)):
        gate = torch.sigmoid(q[..., now, :])
        own = g[..., now, :]
        part = dq[..., now, :]
        total += torch.mul(gate, own, out=part).sum(-2, keepdim=True)
        part.mul_(row).mul_(gate.neg_().add_(1.0))  # out = gate * row
    factor = total.to(k.dtype) / below
    for now in pieces(k.shape[-2], block_length(k)):
        values = exp_(torch.sub(k[..., now, :], top, out=dv[..., now, :])).mul_(factor)
        torch.sub(v[..., now, :], row, out=dk[..., now, :]).mul_(values)
    return dq, dk, dv


everywhere = CustomGradient(_plain, _forward, _backward)
