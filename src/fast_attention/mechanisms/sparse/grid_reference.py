"""Softmax over parts of a grid in plain differentiable operations: one fused call for all tiles."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.fused import biased_attention
from fast_attention.mechanisms.sparse.grid import Axis
from fast_attention.mechanisms.sparse.reference import blockwise_softmax


def grid_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None,
    *, width: int, down: Axis, across: Axis, scale: float,
) -> Tensor:  # fmt: skip
    """Softmax attention of the tokens of a grid, every tile's keys gathered; arguments as in ``grid_tiles.py``."""
    length, leading, device = q.shape[-2], k.shape[-2] - q.shape[-2], q.device
    tall, wide = down.places((length + width - 1) // width, device), across.places(width, device)
    tile = torch.arange(tall.queries.shape[0] * wide.queries.shape[0], device=device)
    row, column = tile.div(wide.queries.shape[0], rounding_mode="floor"), tile % wide.queries.shape[0]
    queries, keys = (
        (rows[row][:, :, None] * width + columns[column][:, None]).flatten(1, 2)
        for rows, columns in zip(tall[:2], wide[:2], strict=True)
    )
    visible = tall.visible[row][:, :, None, :, None] & wide.visible[column][:, None, :, None]
    visible = visible.flatten(3, 4).flatten(1, 2) & (keys < length)[:, None]
    first = torch.arange(leading, device=device).expand(keys.shape[0], leading)
    keys = torch.cat((first, leading + keys.clamp(min=0).clamp(max=length - 1)), -1)
    visible = F.pad(visible, (leading, 0), value=True)
    if key_mask is not None:
        visible = visible & key_mask[..., keys][..., None, :]
    queries = queries.clamp(min=0).clamp(max=length - 1)
    attend = blockwise_softmax if sinks is None else partial(biased_attention, sinks=sinks[:, None])
    near = attend(q[..., queries, :], k[..., keys, :], v[..., keys, :], visible, scale=scale)
    at = torch.arange(length, device=device)
    (row, i), (column, j) = down.tile_of(at.div(width, rounding_mode="floor")), across.tile_of(at % width)
    return near[..., row * wide.queries.shape[0] + column, i * across.size + j, :]
