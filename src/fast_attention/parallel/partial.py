"""Softmax over keys of many processes: each sums over its keys, and the sums are joined under one maximum."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fast_attention.engine.precision import in_float32

SCORES = 2**24  # at once; where there are more, each part computes its own anew in the backward pass

Sums = Float[Tensor, "*batch rows values_and_2"]


def sums(
    q: Float[Tensor, "batch rows width"],
    k: Float[Tensor, "batch keys width"],
    v: Float[Tensor, "batch keys values"],
    visible: Bool[Tensor, "batch keys"],
    scale: float,
) -> Sums:
    """For every query the weighted values, the weights' sum and the maximal score; in float32 or better."""
    if k.shape[-2] == 0:
        k, v, visible = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), F.pad(visible, (0, 1))
    span = max(SCORES // max(q.shape[:-1].numel(), 1), 1)
    parts = list(zip(k.split(span, -2), v.split(span, -2), visible.split(span, -1), strict=True))
    if len(parts) == 1:
        return _sums(q, *parts[0], scale)
    return joined(torch.stack([checkpoint(_sums, q, *part, scale, use_reentrant=False) for part in parts]))


@in_float32
def _sums(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    scores = (q @ k.mT * scale).masked_fill(~visible[..., None, :], float("-inf"))
    top = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    return torch.cat([weights @ v, weights.sum(-1, keepdim=True), top], -1)


def joined(parts: Float[Tensor, "parts *batch rows values_and_2"]) -> Sums:
    """The sums over all parts' keys."""
    top = parts[..., -1:].detach()
    largest = top.amax(0)
    return torch.cat([(parts[..., :-1] * (top - largest).exp()).sum(0), largest], -1)


def mean(total: Sums) -> Float[Tensor, "*batch rows values"]:
    """The softmax's outputs; zeros for a query that sees nothing."""
    weight = total[..., -2:-1]
    return total[..., :-2] / weight.masked_fill(weight == 0, 1.0)
