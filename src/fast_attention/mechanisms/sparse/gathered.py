"""Softmax of blocks of queries over the blocks of keys that a table names for each."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import masks, offsets, tiles
from fast_attention.engine.blocks import join, split, split_mask
from fast_attention.engine.fused import blockwise_softmax
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
    full: Int[Tensor, "*#batch 1 ids"] | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of every block of ``size`` queries over the blocks of keys that ``table`` names.

    A block named twice counts once, -1 names none, and a query that sees nothing gets zeros. The blocks of queries that
    ``full`` names see all keys, whatever the table says. ``bias`` gives what scores gain by offsets, and ``sinks`` make
    normalisers larger by ``e^sink``.
    """
    length, factor = q.shape[-2], float(q.shape[-1] ** -0.5 if scale is None else scale)
    terms = offsets.between(bias, 1 - length, 2 * length - 1, q)
    settings: Any = {"size": size, "is_causal": is_causal, "scale": factor}
    return _gathered(q, k, v, key_mask, *terms, sinks, table, full, first=1 - length, **settings)


def blocks_of_table(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, table: Tensor, full: Tensor | None, *, size: int, is_causal: bool, scale: float, first: int,
) -> Tensor:  # fmt: skip
    """Softmax attention over the blocks of keys that a table names; the reference of ``gathered_softmax``."""
    blocks, inside = split(q, size), torch.arange(size, device=q.device)
    number = table.shape[-2]
    block = torch.arange(number, device=q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Outputs of blocks of queries, which stand at ``queries``, over keys of their own at ``keys``."""
        mask = mask[..., None, :]
        if is_causal:
            mask = mask & (keys[..., None, :] <= queries[..., None])
        if numbers is not None:
            index = (keys[..., None, :] - queries[..., None] - first).clamp(min=0).clamp(max=numbers.shape[-1] - 1)
            bias = offsets.gathered(q, Terms(numbers, vectors), index, scale=scale)
            mask = masks.merge(bias, mask, q.dtype)
        return blockwise_softmax(q, k, v, mask, scale=scale, sinks=sinks, has_bias=numbers is not None)

    chosen = table.clamp(min=0)
    visible = split_mask(key_mask, size).expand(*table.shape[:-2], number, size)[..., None]
    mask = (first_named(table)[..., None] & take(visible, chosen)[..., 0]).flatten(-2)
    keys, values = (take(split(x, size), chosen).flatten(-3, -2) for x in (k, v))
    position = (table[..., None] * size + inside).flatten(-2)
    out = attend(blocks, keys, values, mask, block[:, None] * size + inside, position)
    if full is not None:
        full = full[..., 0, :].expand(*q.shape[:-2], full.shape[-1])
        ids = full.clamp(min=0)
        at = (ids[..., None] * size + inside).flatten(-2)[..., None, :]
        rows, every = take(blocks, ids).flatten(-3, -2), torch.arange(k.shape[-2], device=q.device)
        rows = attend(*(x[..., None, :, :] for x in (rows, k, v)), key_mask[..., None, :], at, every)
        rows = rows.unflatten(-2, (-1, size))
        for i in range(full.shape[-1]):
            named = (block == full[..., i, None])[..., None, None]
            out = torch.where(named, rows[..., 0, i : i + 1, :, :], out)
    return join(out, q.shape[-2])


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


def _plan(q: Tensor, k: Tensor, table: Tensor, full: Tensor | None, *, size: int, is_causal: bool) -> tiles.Plan:
    table, *ids = (tiles.four_axes(x.expand(*k.shape[:-2], *x.shape[-2:])) for x in (table, full) if x is not None)
    return tiles.chosen(table, k.shape[-2], *ids, size=size, is_causal=is_causal)


def _serves(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, table: Tensor, full: Tensor | None, *, size: int, **settings: Any,
) -> str:  # fmt: skip
    """Why FlexAttention does not compute a call."""
    return f"blocks of {size} tokens" if flex.SIZE % size else patterns.against(q, k, v, key_mask, numbers, sinks)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: None, vectors: None, sinks: None, table: Tensor,
    full: Tensor | None, *, size: int, is_causal: bool, scale: float, first: int,
) -> Tensor:  # fmt: skip
    visible = patterns.chosen(q, table, full, size=size, is_causal=is_causal)
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
