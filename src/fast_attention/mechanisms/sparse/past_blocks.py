"""Causal softmax over blocks that every query chooses for itself.

The queries that chose a block are gathered and multiplied with that block, as MoBA's code does (arXiv 2502.13189,
algorithm 1). The core adds up a query's sums over its blocks. The reference, in plain differentiable operations, pads
to tiles of ``ROWS`` queries: how many there are at most depends on sizes alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine import masks, tiles
from fast_attention.engine.blocks import join, positions, smaller, split, split_mask
from fast_attention.engine.operation import like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.mechanisms.sparse.gathered import take

ROWS = 64  # queries of a tile


def chosen_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    choices: Int[Tensor, "*batch length choices"],
    key_mask: Bool[Tensor, "*#batch2 keys"],
    sinks: Float[Tensor, "heads"] | None = None,
    *,
    size: int,
    start: int,
    scale: float,
) -> Float[Tensor, "*batch length values"]:
    """Softmax of each query, the first at position ``start`` and the last the last key, over the past blocks of its
    ``choices`` (-1 names none) and, causally, over the block that it stands in.

    A query that sees nothing gets zeros. With ``sinks`` normalisers are larger by ``e^sink``.
    """
    return _OPERATION(q, k, v, key_mask, None, None, sinks, choices, size=size, start=start, scale=scale)


class Tiles(NamedTuple):
    """Tiles of queries that chose the same block of keys; entry ``i * choices + c`` is choice c of query i."""

    block: Int[Tensor, "*batch tiles"]  # of keys
    entry: Int[Tensor, "*batch tiles rows"]  # that each row of the tiles holds; as many as there are for none
    slot: Int[Tensor, "*batch entries"]  # in which each entry lies, counting rows of all tiles; 0 for none
    named: Bool[Tensor, "*batch entries"]  # whether it names a block
    number: Int[Tensor, "*batch"]  # of tiles that hold anything

    @staticmethod
    def of(choices: Int[Tensor, "*batch length choices"], blocks: int) -> Tiles:
        """Sort the entries by block and begin a tile with each block."""
        rows = smaller(ROWS, choices.shape[-2])
        entries = choices.shape[-2] * choices.shape[-1]
        tiles = blocks + entries // rows  # no more are needed: every block leaves at most one of them unfilled
        named = (choices >= 0).flatten(-2)
        block = torch.where(named, choices.flatten(-2), blocks)
        ascending, order = block.sort(-1)
        sizes = torch.zeros_like(block[..., :1]).expand(*block.shape[:-1], blocks + 1)
        sizes = sizes.scatter_add(-1, block, torch.ones_like(block))
        each = ((sizes + (rows - 1)) // rows)[..., :-1]
        ends = each.cumsum(-1)
        first = (sizes.cumsum(-1) - sizes).gather(-1, ascending)
        begin = pad(ends - each, (0, 1)).gather(-1, ascending)
        slot = begin * rows + torch.arange(entries, device=block.device) - first
        slot = torch.where(ascending < blocks, slot, tiles * rows)
        entry = torch.full_like(block[..., :1], entries).expand(*block.shape[:-1], (tiles + 1) * rows)
        tile = torch.zeros_like(block[..., :1]).expand(*block.shape[:-1], tiles + 1)
        return Tiles(
            tile.scatter(-1, slot // rows, ascending.clamp(max=blocks - 1))[..., :-1],
            entry.scatter(-1, slot, order)[..., positions(tiles, rows, rows, 0, block.device)],
            torch.zeros_like(block).scatter(-1, order, slot.masked_fill(ascending == blocks, 0)),
            named,
            ends[..., -1],
        )

    def scores(
        self, q: Float[Tensor, "*batch length width"], keys: Float[Tensor, "*batch blocks size width"]
    ) -> Float[Tensor, "*batch entries size"]:
        """The products of each entry's query with the keys of its block; what an entry for none holds means nothing."""
        number = self.slot.shape[-1] // q.shape[-2]
        queries = rows_of(q, (self.entry // number).clamp(max=q.shape[-2] - 1))
        return rows_of((queries @ take(keys, self.block).mT).flatten(-3, -2), self.slot)

    def outputs(
        self, weights: Float[Tensor, "*batch entries size"], values: Float[Tensor, "*batch blocks size values"]
    ) -> Float[Tensor, "*batch entries values"]:
        """The weighted sums of the values of each entry's block, zeros for none."""
        weights = rows_of(pad(weights, (0, 0, 0, 1)), self.entry)
        out = rows_of((weights @ take(values, self.block)).flatten(-3, -2), self.slot)
        return out.masked_fill(~self.named[..., None], 0.0)


@in_float32
def _chosen_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: None, vectors: None, sinks: Tensor | None,
    choices: Tensor, *, size: int, start: int, scale: float,
) -> Tensor:  # fmt: skip
    length, number = choices.shape[-2:]
    batch_shape, first, front = q.shape[:-2], start // size, start % size
    keys, values = split(k, size), split(v, size)
    visible = split_mask(key_mask, size).expand(*batch_shape, keys.shape[-3], size)
    queries = split(pad(q, (0, 0, front, 0)), size)
    near = masks.causal(size, size, q.device) & visible[..., first:, None, :]
    near, scores = (
        join(x, front + length)[..., front:, :] for x in (near, scale * queries @ keys[..., first:, :, :].mT)
    )
    if number == 0:
        weights, far = masks.masked_softmax(scores, near, sinks), 0.0
    else:
        gathered = Tiles.of(choices, keys.shape[-3])
        far_scores = gathered.scores(scale * q, keys)
        seen_keys = gathered.named[..., None] & take(visible[..., None], choices.clamp(min=0))[..., 0].flatten(-3, -2)
        sight = torch.cat([near, seen_keys.unflatten(-2, (-1, number)).flatten(-2)], -1)
        far_scores = far_scores.unflatten(-2, (-1, number)).flatten(-2)
        weights = masks.masked_softmax(torch.cat([scores, far_scores], -1), sight, sinks)
        far = gathered.outputs(weights[..., size:].unflatten(-1, (number, size)).flatten(-3, -2), values)
        far = far.unflatten(-2, (-1, number)).sum(-2)
    weights = split(pad(weights[..., :size], (0, 0, front, 0)), size)
    return join(weights @ values[..., first:, :, :], front + length)[..., front:, :] + far


def rows_of(x: Tensor, index: Int[Tensor, "*batch taken"]) -> Tensor:
    """Whole tokens (*batch, n, E) at (*batch, taken)."""
    return take(x[..., None, :], index)[..., 0, :]


def _plan(q: Tensor, k: Tensor, choices: Tensor, *, size: int, start: int) -> tiles.Plan:
    return tiles.Plan.of_choices(choices, size)


_OPERATION = tiles.operation(
    _chosen_softmax,
    _plan,
    path="softmax in tiles of gathered queries",
    name="softmax in tiles of gathered queries",
    why="every query reads a few blocks of its past",
    sizes=lambda *tensors, **settings: {"choices": tensors[7].shape[-1]},
    empty=like_queries,
)
