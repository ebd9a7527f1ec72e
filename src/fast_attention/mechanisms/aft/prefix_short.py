"""Causal AFT-simple of few tokens: one cumulative sum in one unit, while no query has seen only keys far below it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.exponential import exp_
from fast_attention.engine.tracing import traced
from fast_attention.mechanisms.aft.pool import gated_means
from fast_attention.mechanisms.aft.pool_passes import unit

SHORT = 256  # tokens up to which fewer calls count more than sums side by side
RANGE = 60.0  # the natural logarithm of the smallest sum that a unit may leave; float32 ends at 87


def pays(k: Tensor) -> bool:
    """Whether the keys (..., S, D) are few, and the first of every channel lies within ``RANGE`` of the largest."""
    if not 0 < k.shape[-2] <= SHORT or not k.numel() or traced():
        return False
    return bool((k.detach().amax(-2) - k.detach()[..., 0, :]).amax() <= RANGE)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return gated_means(q, k, v)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    width, top = v.shape[-1], unit(k)
    terms = k.new_empty(*k.shape[:-1], 2 * width)
    above, below = terms.split(width, -1)
    torch.mul(exp_(torch.sub(k, top, out=below)), v, out=above)
    above, below = terms.cumsum(-2).split(width, -1)
    return q.sigmoid().mul_(above).div_(below), (top, below) if keep else ()


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    (q, k, v), (out,), (top, below), (g,) = inputs, outputs, kept, gradients
    width, gate = v.shape[-1], q.sigmoid()
    terms = g.new_empty(*g.shape[:-1], 2 * width)
    by_above, by_below = terms.split(width, -1)
    torch.div(g, below, out=by_above)
    torch.mul(by_above, out, out=by_below).neg_()
    by_above.mul_(gate)
    by_above, by_below = terms.flip(-2).cumsum(-2).flip(-2).split(width, -1)
    weights = exp_(k - top)
    dk = torch.addcmul(by_below, v, by_above).mul_(weights)
    return gate.neg_().add_(1.0).mul_(out).mul_(g), dk, weights.mul_(by_above)


together = CustomGradient(_plain, _forward, _backward)
