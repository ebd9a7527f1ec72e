"""Softmax over every block of keys beside the block sorted to its position, in plain differentiable operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks
from fast_attention.engine.fused import fused_attention, open_attention
from fast_attention.engine.tracing import exporting
from fast_attention.mechanisms.sinkhorn.sorting import sort_blocks


def sorted_softmax(q: Tensor, S: Tensor, k: Tensor, v: Tensor, *, first: int, is_causal: bool) -> Tensor:
    """Softmax of blocks of queries over own and sorted keys, all of them visible; arguments as in ``fast.py``."""
    sides = [torch.cat([(S @ x.flatten(-2)).unflatten(-1, x.shape[-2:]), x[..., first:, :, :]], -2) for x in (k, v)]
    mask = None
    if is_causal:
        size = q.shape[-2]
        mask = F.pad(masks.causal(size, size, q.device), (size, 0), value=True)
        if first == 0:  # nothing is before the first block
            mask = mask.expand(q.shape[-3], -1, -1).clone()
            mask[0, :, :size] = False
    if exporting():  # the fused kernels ask how strides compare
        return open_attention(q, sides[0], sides[1], mask)
    keys, values = (x.flatten(0, -4) for x in sides)  # blocks stand where the fused kernels expect heads
    return fused_attention(q.flatten(0, -4), keys, values, mask).unflatten(0, q.shape[:-3])


def masked_softmax(
    q: Tensor, S: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, first: int, is_causal: bool
) -> Tensor:
    """Softmax of blocks of queries where only a fraction of a sorted key may be ``visible`` (..., blocks, size)."""
    size, best = q.shape[-2], sort_blocks(S, k, v, visible)
    unsorted = visible[..., first:, None, :]
    if is_causal:
        unsorted = unsorted & masks.causal(size, size, q.device)
    unsorted = unsorted.expand(*best.visible.shape[:-1], size, size)
    mask = torch.cat([best.visible[..., None, :].expand(unsorted.shape), unsorted], -1)
    scores = q @ torch.cat([best.k, k[..., first:, :, :]], -2).mT * q.shape[-1] ** -0.5
    scores = scores + F.pad(best.log_fraction, (0, size))[..., None, :]
    return masks.masked_softmax(scores, mask) @ torch.cat([best.v, v[..., first:, :, :]], -2)
