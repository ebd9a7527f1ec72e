"""``gathered_softmax`` of noncausal choices on a CPU: some blocks of queries at a time, whatever heads they are of.

The tiles of ``gathered.py`` hold one block of every head, and serve the backward pass, causal choices and blocks that
see everything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.blocks import split_mask
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tiled import flatten, weights
from fast_attention.engine.tiling import Sinks
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.sparse import gathered, reference

BLOCKS = 8  # of queries that are computed together


def chosen_softmax(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor, sinks: Tensor | None = None,
    *, size: int, scale: float | None,
) -> Tensor:  # fmt: skip
    """``gathered_softmax``, noncausal, of a ``table`` that names no block twice; keys are as many as queries."""
    if dispatch.obstacle(q, k):
        return gathered.gathered_softmax(q, k, v, table, key_mask, size=size, scale=scale, sinks=sinks)
    why = "every block of queries reads a few blocks of keys"
    dispatch.record("softmax over gathered blocks", why, rows=size, choices=table.shape[-1])
    settings = {"is_causal": False, "start": 0, "stop": table.shape[-2]}
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return _fast(q, k, v, table, key_mask, None, None, sinks, size=size, scale=factor, **settings)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor, numbers: None, vectors: None,
    sinks: Tensor | None, *, keep: bool, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    queries, keys, values = (flatten(x, size).view(-1, size, x.shape[-1]) for x in (q, k, v))
    index = table.clamp(min=0).reshape(-1, *table.shape[-2:])
    index = (index + torch.arange(len(index), device=index.device)[:, None, None] * table.shape[-2]).flatten(0, 1)
    heads = None if sinks is None else sinks.to(q.dtype).expand(q.shape[:-2])
    rows = None if heads is None else Sinks(heads.flatten().repeat_interleave(table.shape[-2]))
    out = queries.new_empty(*queries.shape[:-1], values.shape[-1])
    visible, work = _visible(table, key_mask, index, size), Workspace(q)
    for first in range(0, len(queries), BLOCKS):
        part = slice(first, first + BLOCKS)
        some = (_read(x, index[part], work, name) for name, x in (("k", keys), ("v", values)))
        masked = None if visible is None else ~visible[part, None]
        beside = None if rows is None else rows.of(part)
        P = weights(queries[part], next(some), None, masked, scale=scale, work=work, sinks=beside)
        torch.bmm(P, next(some), out=out[part])
    out = out.view(*q.shape[:-2], -1, values.shape[-1])
    return out if out.shape[-2] == q.shape[-2] else out[..., : q.shape[-2], :].contiguous(), ()


def _read(x: Tensor, index: Tensor, work: Workspace, name: str) -> Tensor:
    """Gathered blocks, (blocks of queries, span, E)."""
    rows = work(name, index.numel(), x[0].numel())
    return torch.index_select(x.flatten(1), 0, index.flatten(), out=rows).view(len(index), -1, x.shape[-1])


def _visible(table: Tensor, key_mask: Tensor, index: Tensor, size: int) -> Tensor | None:
    """What each block of queries sees of the keys that it chose, (blocks, span); None: all."""
    named, inside = table >= 0, split_mask(key_mask, size)
    if named.all() and inside.all():
        return None
    inside = inside.expand(*table.shape[:-1], size).reshape(-1, size)[index]
    return (inside & named.reshape(*index.shape, 1)).flatten(1)


_fast = in_float32(CustomGradient(reference.gathered_softmax, _forward, gathered.tile_gradients))
