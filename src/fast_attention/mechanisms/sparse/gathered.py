"""Softmax of blocks of queries over the blocks of keys that a table names for each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import masks, offsets, tiles
from fast_attention.engine.blocks import join, split, split_mask
from fast_attention.engine.fused import biased_attention, blockwise_softmax, fused_attention
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.operation import Fast, like_queries
from fast_attention.engine.tracing import exporting
from fast_attention.gpu import flex, patterns


def gathered_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    table: Int[Tensor, "*batch blocks choices"],
    key_mask: Bool[Tensor, "*#batch2 length"],
    *,
    size: int,
    is_causal: bool = False,
    scale: float | None = None,
    start: int = 0,
    stop: int | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of every block of ``size`` queries over the blocks of keys that ``table`` names.

    A block named twice counts once, -1 names none, and a query that sees nothing gets zeros. The blocks of queries
    before ``start`` and from ``stop`` on see all keys, whatever the table says; give no mask then. ``bias`` gives what
    scores gain by offsets, and ``sinks`` make normalisers larger by ``e^sink``: both for blocks in the table only.
    """
    factor, stop = float(q.shape[-1] ** -0.5 if scale is None else scale), table.shape[-2] if stop is None else stop
    terms, length = (None, None), q.shape[-2]
    if bias is not None:
        terms = bias(torch.arange(1 - length, length, device=q.device))
    settings: Any = {"size": size, "is_causal": is_causal, "start": start, "stop": stop, "scale": factor}
    return _gathered(q, k, v, key_mask, *terms, sinks, table, first=1 - length, **settings)


def blocks_of_table(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, table: Tensor, *, size: int, is_causal: bool, scale: float, start: int, stop: int, first: int,
) -> Tensor:  # fmt: skip
    """Softmax attention over the blocks of keys that a table names; the reference of ``gathered_softmax``."""
    length, number = q.shape[-2], table.shape[-2]
    position = (table[..., None] * size + torch.arange(size, device=q.device)).flatten(-2)
    chosen = table.clamp(min=0)
    visible = split_mask(key_mask, size).expand(*table.shape[:-2], number, size)[..., None]
    mask = (first_named(table)[..., None] & take(visible, chosen)[..., 0]).flatten(-2)[..., None, :]
    queries = torch.arange(number, device=q.device)[:, None] * size + torch.arange(size, device=q.device)
    if is_causal:
        mask = mask & (position[..., None, :] <= queries[..., None])
    blocks, attend = split(q, size), blockwise_softmax
    if sinks is not None:
        attend = partial(biased_attention, sinks=sinks[:, None])
    if numbers is not None:
        index = (position[..., None, :] - queries[..., None] + (length - 1)).clamp(0, 2 * length - 2)
        bias = offsets.gathered(blocks, Terms(numbers, vectors), index, scale=scale)
        mask, attend = masks.merge(bias, mask, q.dtype), biased_attention if sinks is None else attend
    keys, values = (take(split(x, size), chosen).flatten(-3, -2) for x in (k, v))
    out = join(attend(blocks, keys, values, mask, scale=scale), length)
    if start == 0 and stop == number:
        return out
    ends = torch.cat((q[..., : start * size, :], q[..., stop * size :, :]), -2)
    rows = fused_attention(ends, k, v, scale=scale)
    return torch.cat(
        (rows[..., : start * size, :], out[..., start * size : stop * size, :], rows[..., start * size :, :]), -2
    )


def first_named(table: Int[Tensor, "*batch choices"]) -> Tensor:
    """Whether a choice names a block that no choice before it names."""
    return (table >= 0) & ~(table[..., None] == table[..., None, :]).tril(-1).any(-1)


def take(blocks: Tensor, table: Int[Tensor, "*batch_and_taken"]) -> Tensor:
    """(*batch, n, size, E) at ``table`` (*batch, *taken) -> (*batch, *taken, size, E): whole rows are copied."""
    batch_shape, row = blocks.shape[:-3], blocks.shape[-2:]
    if exporting():  # see blocks.py: a flattened table cannot be proved to unflatten again
        ones = [1] * table.ndim
        which = [
            torch.arange(n, device=blocks.device).view(*ones[:i], n, *ones[i + 1 :]) for i, n in enumerate(batch_shape)
        ]
        return blocks[(*which, table)]
    which = torch.arange(batch_shape.numel(), device=blocks.device).view(
        *batch_shape, *[1] * (table.ndim - len(batch_shape))
    )
    rows = blocks.reshape(-1, *row).index_select(0, (table + which * blocks.shape[-3]).flatten())
    return rows.view(*table.shape, *row)


def _plan(q: Tensor, k: Tensor, table: Tensor, *, size: int, is_causal: bool, start: int, stop: int) -> tiles.Plan:
    table = table.expand(*k.shape[:-2], *table.shape[-2:])
    table = table.reshape(-1, k.shape[-3] if k.ndim > 2 else 1, *table.shape[-2:])
    return tiles.chosen(table, k.shape[-2], size=size, is_causal=is_causal, start=start, stop=stop)


def _serves(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, table: Tensor, *, size: int, **settings: Any,
) -> str:  # fmt: skip
    """Why FlexAttention does not compute a call."""
    if numbers is not None or sinks is not None:
        return "positions or sinks add to the scores"
    return f"blocks of {size} tokens" if flex.SIZE % size else patterns.against(q, k, v, key_mask)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: None, vectors: None, sinks: None, table: Tensor, *,
    size: int, is_causal: bool, start: int, stop: int, scale: float, first: int,
) -> Tensor:  # fmt: skip
    visible = patterns.chosen(q, table, size=size, is_causal=is_causal, start=start, stop=stop)
    return flex.attend(q, k, v, visible, key_mask, scale=scale)


_gathered = tiles.operation(
    blocks_of_table,
    _plan,
    path="softmax in blocks",
    why="every block of queries reads a few blocks of keys",
    sizes=lambda *tensors, size, **settings: {"rows": size, "choices": tensors[7].shape[-1]},
    cuda=Fast(_flex, None, serves=_serves),
    empty=like_queries,
)
