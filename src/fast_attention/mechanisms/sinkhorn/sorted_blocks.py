"""Softmax over every block of keys beside the block that was sorted to its place."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.fused import fused_attention, open_attention
from fast_attention.engine.tracing import exporting
from fast_attention.mechanisms.sinkhorn import sorted_tiles
from fast_attention.mechanisms.sinkhorn.transport import sort_blocks


def sorted_softmax(
    q: Float[Tensor, "*batch rows size width"],
    S: Float[Tensor, "*batch rows blocks"],
    k: Float[Tensor, "*batch blocks size width"],
    v: Float[Tensor, "*batch blocks size values"],
    *,
    first: int,
    is_causal: bool,
) -> Float[Tensor, "*batch rows size values"]:
    """Blocks of queries, the last ones from ``first`` on, over their own and sorted keys, all of them visible."""
    attend = _tiled if q.is_cpu and 0 not in (*q.shape, *v.shape) else _plain
    return attend(q, S, k, v, first=first, is_causal=is_causal)


def _plain(q: Tensor, S: Tensor, k: Tensor, v: Tensor, *, first: int, is_causal: bool) -> Tensor:
    sides = [torch.cat([(S @ x.flatten(-2)).unflatten(-1, x.shape[-2:]), x[..., first:, :, :]], -2) for x in (k, v)]
    mask = None
    if is_causal:
        size = q.shape[-2]
        mask = F.pad(masks.causal(size, size, q.device), (size, 0), value=True)
        if first == 0:  # nothing is before the first block
            mask = mask.expand(q.shape[-3], -1, -1).clone()
            mask[0, :, :size] = False
    if exporting():  # see blockwise_softmax
        return open_attention(q, sides[0], sides[1], mask)
    keys, values = (x.flatten(0, -4) for x in sides)  # blocks stand where the fused kernels expect heads
    return fused_attention(q.flatten(0, -4), keys, values, mask).unflatten(0, q.shape[:-3])


_tiled = CustomGradient(_plain, sorted_tiles.forward, sorted_tiles.backward)


def masked_blocks(q: Tensor, S: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, first: int, is_causal: bool) -> Tensor:
    """The same, where of a sorted place only a share may be visible."""
    size, best = q.shape[-2], sort_blocks(S, k, v, seen)
    own = seen[..., first:, None, :]
    if is_causal:
        own = own & masks.causal(size, size, q.device)
    own = own.expand(*best.seen.shape[:-1], size, size)
    mask = torch.cat([best.seen[..., None, :].expand(own.shape), own], -1)
    scores = q @ torch.cat([best.k, k[..., first:, :, :]], -2).mT * q.shape[-1] ** -0.5
    scores = scores + F.pad(best.share, (0, size))[..., None, :]
    return masks.masked_softmax(scores, mask) @ torch.cat([best.v, v[..., first:, :, :]], -2)
