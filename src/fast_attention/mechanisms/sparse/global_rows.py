"""The rows of blocks of queries that see all keys, among the rows of others."""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine import masks, offsets
from fast_attention.engine.blocks import join, split
from fast_attention.engine.fused import biased_attention, fused_attention
from fast_attention.engine.offsets import Positions
from fast_attention.engine.precision import in_float32
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse.reference import take


def with_global_rows(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, visible: Tensor,
    *, size: int, scale: float | None, bias: Positions | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """``out`` with the rows of the global blocks ``ids`` (..., 1, G) computed over all keys."""
    length, blocks = q.shape[-2], split(q, size)
    ids = ids.clamp(min=0).clamp(max=blocks.shape[-3] - 1).expand(*q.shape[:-2], ids.shape[-1])
    rows = take(blocks, ids).flatten(-3, -2)
    mask = visible[..., None, :].expand(*rows.shape[:-1], length)
    if bias is not None:
        rows = _biased_rows(rows, k, v, ids, mask, bias, sinks, size=size, scale=scale)
    elif sinks is not None:
        rows = softmax_attention(rows, k, v, key_mask=visible, scale=scale, sinks=sinks)
    else:
        rows = fused_attention(rows, k, v, mask, scale=scale)
    rows = rows.unflatten(-2, (-1, size))
    numbers = torch.arange(blocks.shape[-3], device=q.device)
    parts = split(out, size)
    for i in range(ids.shape[-1]):
        global_block = (numbers == ids[..., i, None])[..., None, None]
        parts = torch.where(global_block, rows[..., i : i + 1, :, :], parts)
    return join(parts, length)


@in_float32
def _biased_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    mask: Tensor,
    bias: Positions,
    sinks: Tensor | None,
    *,
    size: int,
    scale: float | None,
) -> Tensor:
    """Softmax over all keys of the queries of the blocks ``ids`` (..., H, G)."""
    factor, length = float(q.shape[-1] ** -0.5 if scale is None else scale), k.shape[-2]
    queries = (ids[..., None] * size + torch.arange(size, device=q.device)).flatten(-2)
    terms = bias(torch.arange(1 - length, length, device=q.device))
    index = (torch.arange(length, device=q.device) - queries[..., None] + (length - 1)).clamp(min=0)
    scores = offsets.gathered(q[..., None, :, :], terms, index[..., None, :, :], scale=factor)[..., 0, :, :]
    return biased_attention(q, k, v, masks.merge(scores, mask, q.dtype), scale=factor, sinks=sinks)
