"""Spreads BigBird: every process fetches the blocks that its queries see, and global queries go to all keys.

The random blocks follow from the seeds, so that all processes know which tokens each of them reads. Each process sums
over its keys for all global queries, and the sums are joined where the queries came from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fast_attention import checks
from fast_attention.engine.precision import in_float32, widen
from fast_attention.mechanisms.sparse.bigbird import BigBird, global_blocks
from fast_attention.mechanisms.sparse.pattern import pattern
from fast_attention.mechanisms.sparse.reference import blockwise_softmax, first_named, take
from fast_attention.parallel import collectives, partial
from fast_attention.parallel.blocks import Exchange, Grid, exchange, tokens
from fast_attention.parallel.strategy import Call, Sizes, Strategy

NUMBERS = 2**26  # of keys and values at once; where there are more, parts are gathered anew in the backward pass


class Plan(NamedTuple):
    """What blocks of queries see, the same on all processes, for N heads of all sequences."""

    table: Tensor  # (N, blocks, choices), -1 names none; none for global blocks
    edges: Tensor | None  # (N, blocks): which ones see all keys; None where none does
    grid: Grid

    def wanted(self) -> list[Tensor]:
        """The blocks (N, blocks) that each process's queries see."""
        wanted = []
        for rank in range(self.grid.shards.world):
            first, end = self.grid.blocks(rank)
            named = self.table[:, first:end].flatten(1)
            row = named.new_zeros(len(named), self.table.shape[1] + 1, dtype=torch.bool)
            wanted.append(row.scatter(1, named.where(named >= 0, self.table.shape[1]), True)[:, :-1])
        return wanted

    def everyone(self) -> list[Tensor]:
        """The global blocks, for each process."""
        assert self.edges is not None
        return [self.edges] * self.grid.shards.world


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs: its queries over the blocks that they see, those of global blocks over all keys."""
    mechanism, lead, w = _mechanism(call), q.shape[:-2], checks.weights(call.mechanism, call.w, q)
    scale = q.shape[-1] ** -0.5 if mechanism.scale is None else mechanism.scale
    mask = None if call.key_mask is None else call.key_mask.expand(*k.shape[:-3], -1)
    k, v, _ = checks.without_masked(k, v, mask, mechanism.traits.reads)
    plan = _plan(call, w.seeds, lead[:-1].numel(), _last(call, mask))
    q, k, v = (x.flatten(0, -3) for x in (q, k, v))
    visible = torch.ones_like(k[..., 0], dtype=torch.bool)
    if mask is not None:
        visible = mask[..., None, :].expand(*lead, -1).reshape(visible.shape)
    columns = [k, v] if mask is None else [k, v, visible[..., None].to(k.dtype)]
    near = exchange(plan.wanted(), plan.grid, is_causal=call.is_causal)
    blocks, received = near.fetch(torch.cat(columns, -1))
    out = q[..., :1].expand(*q.shape[:-1], v.shape[-1])
    if q.shape[-2]:
        out = _blocks(q, blocks, plan.table, near, values=v.shape[-1], is_causal=call.is_causal, scale=scale)
    out = collectives.with_gradient(out, received)
    if plan.edges is not None:
        out = _with_global_rows(out, q, k, v, visible, exchange(plan.everyone(), plan.grid, is_causal=False), scale)
    return out.view(*lead, *out.shape[-2:])


def _mechanism(call: Call) -> BigBird:
    assert isinstance(call.mechanism, BigBird)
    return call.mechanism


def _last(call: Call, mask: Tensor | None) -> Tensor | None:
    """How many tokens of each sequence (B,) end with its last visible one; None where the pattern does not ask."""
    if mask is None or call.is_causal:
        return None
    positions = torch.arange(mask.shape[-1], device=mask.device) + call.shards.key_start + 1
    end = F.pad(torch.where(mask, positions, 0), (1, 0)).amax(-1).flatten()
    return collectives.all_gather(end, call.shards.group).amax(0)


def _plan(call: Call, seeds: Tensor, batch: int, end: Tensor | None) -> Plan:
    """The plan for ``batch`` sequences, the last visible token of each just before ``end`` (B,)."""
    mechanism, is_causal = _mechanism(call), call.is_causal
    size = mechanism.block_size
    front, first, last = global_blocks(
        size, mechanism.num_global_blocks, mechanism.num_global_tokens, is_causal=is_causal
    )
    grid = Grid(size, front, call.shards)
    number = grid.number
    total = torch.full((1,), number, device=seeds.device)
    if end is not None:
        total = torch.where(end > 0, end + front + size - 1, 0) // size
    total = total[:, None, None, None]
    table = pattern(
        seeds[:, None], total, number=number, first=first, last=last, half=mechanism.window_blocks // 2,
        draws=mechanism.num_random_blocks, is_causal=is_causal,
    )  # fmt: skip
    table = table.expand(batch, len(seeds), *table.shape[-2:]).flatten(0, 1)
    block = torch.arange(number, device=seeds.device)
    if is_causal:
        return Plan(table.where(table <= block[:, None], -1), None, grid)
    if first + last == 0:
        return Plan(table, None, grid)
    edges = (block < first) | ((block >= total[..., 0] - last) & (block < total[..., 0]))
    edges = edges.expand(batch, len(seeds), number).flatten(0, 1)
    return Plan(table.masked_fill(edges[..., None], -1), edges, grid)


def _blocks(
    q: Tensor, blocks: Tensor, table: Tensor, near: Exchange, *, values: int, is_causal: bool, scale: float
) -> Tensor:
    """Softmax of this process's queries (N, L, E) over the fetched blocks of keys, values and what is visible."""
    size, front, shards = near.grid
    first, end = near.grid.blocks(shards.rank)
    before = shards.start + front - first * size
    queries = F.pad(q, (0, 0, before, (end - first) * size - before - q.shape[-2])).unflatten(-2, (-1, size))
    span = max(NUMBERS // (table.shape[-1] * blocks[:, 0].numel()), 1)
    settings = {"values": values, "is_causal": is_causal, "scale": scale}
    if end - first <= span:
        parts = [_some_blocks(queries, blocks, table[:, first:end], near, first, **settings)]
    else:
        parts = [
            checkpoint(
                _some_blocks, part, blocks, table[:, i : i + part.shape[1]], near, i, use_reentrant=False, **settings
            )
            for i, part in zip(range(first, end, span), queries.split(span, 1), strict=True)
        ]
    return torch.cat(parts, 1).flatten(-3, -2)[..., before : before + q.shape[-2], :]


@in_float32
def _some_blocks(
    queries: Tensor, blocks: Tensor, table: Tensor, near: Exchange, first: int,
    *, values: int, is_causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Those of the blocks of queries (N, n, size, E) from number ``first`` on, whose rows of the table are given."""
    (size, front, shards), device = near.grid, queries.device
    chosen = near.number.gather(1, table.clamp(min=0).flatten(1)).view_as(table)
    keys, width = take(blocks, chosen).flatten(-3, -2), queries.shape[-1]
    k, v, mask = keys.split([width, values, keys.shape[-1] - width - values], -1)
    within = torch.arange(size, device=device)
    position = (table[..., None] * size + within).flatten(-2)
    visible = first_named(table)[..., None].expand(*table.shape, size).flatten(-2)
    visible = (visible & (position >= front) & (position < shards.num_keys + front))[..., None, :]
    if mask.shape[-1]:
        visible = visible & (mask.detach().mT > 0.5)
    if is_causal:
        rows = torch.arange(first, first + table.shape[1], device=device)[:, None] * size + within
        visible = visible & (position[..., None, :] <= rows[..., None])
    return blockwise_softmax(queries, k, v, visible, scale=scale)


def _with_global_rows(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, queries: Exchange, scale: float
) -> Tensor:
    """``out`` (N, L, Ev) with this process's rows of the global blocks computed over all processes' keys."""
    blocks, received = queries.fetch(q)
    parts = partial.sums(widen(blocks.flatten(1, 2)), k, v, visible, scale)
    gathered = queries.give_back(parts)
    rows = partial.mean(partial.joined(gathered)).to(out.dtype)
    flat = out.flatten(0, 1).index_copy(0, queries.outgoing[queries.grid.shards.rank], rows)
    return collectives.with_gradient(collectives.with_gradient(flat.view_as(out), gathered), received)


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent where the last token of each sequence is visible: a mask moves the last blocks and the random ones."""
    shards, plan = call.shards, _plan(call, call.w.seeds, sizes.batch, None)
    others, wanted = [rank for rank in range(shards.world) if rank != shards.rank], plan.wanted()
    near = sum(len(tokens(wanted, plan.grid, shards.rank, rank, is_causal=call.is_causal)) for rank in others)
    numbers = near * (sizes.width + sizes.values + call.masked) * sizes.itemsize
    if call.masked and not call.is_causal:
        numbers += len(others) * sizes.batch * 8
    if plan.edges is None:
        return numbers
    rows = [len(tokens(plan.everyone(), plan.grid, rank, 0, is_causal=False)) for rank in range(shards.world)]
    queries = len(others) * rows[shards.rank] * sizes.width * sizes.itemsize
    return numbers + queries + sum(rows[rank] for rank in others) * (sizes.values + 2) * max(sizes.itemsize, 4)


BLOCKS = Strategy(
    "blocks, global queries", "all-to-alls of the blocks that queries see, of global queries, and of sums for them",
    attend, sends,
)  # fmt: skip
