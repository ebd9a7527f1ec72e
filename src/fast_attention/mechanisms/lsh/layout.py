"""Lays hashed tokens out in chunks of slots: which token is in which slot, and which chunks meet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

PARTS = 2  # of a chunk: the last one of a group is as wide as needed, in whole parts; more parts, smaller products
SMALL = 2**14  # codes below this are compared, doubled, as int16


class Block(NamedTuple):
    """Chunks of one width, one after the other."""

    start: int  # first slot
    width: int
    number: int

    def of(self, x: Tensor) -> Tensor:
        """The rows of ``x`` (slots, ...) as (number, width, ...): a view."""
        return x[self.start : self.start + self.width * self.number].view(self.number, self.width, *x.shape[1:])

    def split(self, most: int) -> Iterator[Block]:
        """At most so many of the chunks at a time."""
        for a in range(0, self.number, most):
            yield Block(self.start + a * self.width, self.width, min(most, self.number - a))


class Chunks(NamedTuple):
    """One round of hashing of T tokens: n slots in chunks, each of one group of tokens (a bucket, or a whole lane)."""

    table: Tensor  # (n,): the token in every slot; empty slots repeat the last before them in their chunk
    valid: Tensor  # (n,): 1 where a slot holds a token of its own, else 0
    blocks: list[Block]  # all chunks
    runs: list[tuple[Block, Block]]  # chunks, and those before them in their groups
    back: Tensor  # (T,): the slot of every token; ``most`` where it is masked
    code: Tensor  # (T,): twice a number; i reaches j where the numbers differ by 0 or 1
    most: int  # slots of any round


class Order(NamedTuple):
    """Tokens of all rounds and lanes by bucket, then by position; a row of wide = buckets + 1 is a lane in a round."""

    bucket: Tensor  # (rounds T,): row * wide + bucket, rows round by round, ascending
    token: Tensor  # (rounds T,): the token that has this bucket
    lanes: int
    rounds: int
    wide: int


@torch.no_grad()
def sort_by_bucket(bucket: Int[Tensor, "lanes rounds length"], *, number: int, together: int) -> list[Order]:
    """The order of every ``together`` lanes, tokens numbered through them; one sort for all, which is fastest."""
    _, rounds, length = bucket.shape
    wide, groups = number + 1, bucket.split(together)
    rows = torch.arange(len(bucket) * rounds, device=bucket.device, dtype=torch.int32)[:, None]
    flat = torch.cat([lanes.transpose(0, 1).reshape(-1, length) for lanes in groups])
    buckets, tokens = (flat.int() + wide * rows).flatten().sort(stable=True)
    orders, at = [], 0
    for lanes in groups:
        end = at + lanes.numel()
        before = torch.arange(at, end, length * len(lanes), device=bucket.device)[:, None]
        token = (tokens[at:end].view(rounds, -1) - before).flatten()
        orders.append(Order(buckets[at:end] - at // length * wide, token, len(lanes), rounds, wide))
        at = end
    return orders


@torch.no_grad()
def lay_out(order: Order, *, size: int, ranked: bool, across: bool, dtype: torch.dtype) -> list[Chunks]:
    """The chunks of every round.

    No chunk holds tokens of two lanes, nor, if ``ranked``, of two buckets; see ``reference.arrange``. Masked tokens are
    in none. Time and memory O(rounds T).
    """
    flat, wide, rounds = order.bucket.view(order.rounds, -1), order.wide, order.rounds
    full = torch.bincount(order.bucket, minlength=rounds * order.lanes * wide).view(rounds, -1, wide)
    real = full[..., :-1]
    ends = full.flatten().cumsum(0).view_as(full)
    base = torch.arange(rounds, device=flat.device)[:, None] * (order.lanes * wide)
    bucket = flat - base
    masked = bucket % wide == wide - 1
    if ranked:
        starts, counts, group = (ends - full).flatten(1), F.pad(real, (0, 1)).flatten(1), bucket
    else:
        starts, counts = ends[..., -1] - full.sum(-1), real.sum(-1)
        group = torch.div(bucket, wide, rounding_mode="floor")
    group = group.long()
    rank = torch.arange(flat.numel(), device=flat.device).view_as(flat) - starts.gather(-1, group)
    index = torch.div(rank, size, rounding_mode="floor")  # of the token's chunk in its group
    code = _codes(index, bucket, group, (counts + size - 1) // size, order, size=size, across=across)
    layouts = [_layout(*each, size=size) for each in zip(index, group, counts, strict=True)]
    most = max(layout.slots for layout in layouts)
    slot = torch.stack([layout.base for layout in layouts]).add_(rank % size).masked_fill_(masked, most)
    token = order.token.view_as(flat)
    back, codes = (torch.empty_like(x).scatter_(1, token, x) for x in (slot, code))
    table = token.new_zeros(rounds, most + 1).scatter_(1, slot, token)[:, :-1]
    valid = slot.new_zeros(rounds, most + 1, dtype=dtype).scatter_(1, slot, 1.0)[:, :-1]
    table = table.gather(1, torch.where(valid > 0, torch.arange(most, device=slot.device), 0).cummax(1).values)
    return [
        Chunks(table[r, : each.slots], valid[r, : each.slots], each.blocks, each.runs, back[r], codes[r], most)
        for r, each in enumerate(layouts)
    ]


class Layout(NamedTuple):
    """The slots of a round's chunks."""

    base: Tensor  # (T,): the first slot of every sorted token's chunk
    slots: int
    blocks: list[Block]
    runs: list[tuple[Block, Block]]


def _layout(index: Tensor, group: Tensor, counts: Tensor, *, size: int) -> Layout:
    """The chunks of groups of so many tokens (G,), such that chunks in a row have those before them in a row as well.

    The first chunks of all groups come first, the longest group leading, then all second ones, and so on; then the
    last chunks of the groups that fill a part of one only: these are narrow, of whole parts.
    """
    parts = min(PARTS, size)
    width_of_part, (ordered, order) = size // parts, counts.sort(descending=True, stable=True)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    full = (ordered + size - (parts - 1) * width_of_part - 1) // size  # chunks of full width
    part = ((ordered - full * size).clamp_(min=0) + width_of_part - 1) // width_of_part
    kinds, numbers = torch.unique_consecutive(full * parts + part, return_counts=True)
    alike = [(kind // parts, kind % parts, n) for kind, n in zip(kinds.tolist(), numbers.tolist(), strict=True)]
    deepest = alike[0][0] if alike else 0
    if deepest > 1 + sum(n for full_chunks, _, n in alike if full_chunks > 1):
        return _few_long(index, group, (counts + size - 1) // size, size=size)
    wide = [sum(n for full_chunks, _, n in alike if full_chunks > at) for at in range(deepest)]
    first = [0, *accumulate(wide)]
    blocks = [Block(0, size, first[-1])]
    runs = [
        (Block(b * size, size, n), Block(a * size, size, n))
        for a, b, n in zip(first, first[1:], wide[1:], strict=False)
    ]
    at, remainders, ends = first[-1] * size, [0] * len(alike), [0, *accumulate(n for _, _, n in alike)]
    for width in range((parts - 1) * width_of_part, 0, -width_of_part):
        begin = at
        for g, (full_chunks, parts_of_last, n) in enumerate(alike):
            if parts_of_last * width_of_part == width:
                remainders[g] = at - ends[g] * width
                if full_chunks:
                    before = (first[full_chunks - 1] + ends[g]) * size
                    runs.append((Block(at, width, n), Block(before, size, n)))
                at += n * width
        blocks.append(Block(begin, width, (at - begin) // width))
    offsets = torch.arange(len(position), device=part.device) * (part * width_of_part)
    remainder = part.new_tensor(remainders).repeat_interleave(numbers) + offsets
    row = position.index_select(0, group)
    base_if_full = (part.new_tensor(first).index_select(0, index.clamp(max=deepest)) + row) * size
    base = torch.where(index < full.index_select(0, row), base_if_full, remainder.index_select(0, row))
    return Layout(base, at, blocks, runs)


def _few_long(index: Tensor, group: Tensor, numbers: Tensor, *, size: int) -> Layout:
    """The chunks of few long groups, so many each: one after the other, so that the runs are few."""
    first, total = numbers.cumsum(0) - numbers, int(numbers.sum())
    runs = [
        (Block((a + 1) * size, size, n - 1), Block(a * size, size, n - 1))
        for a, n in zip(first.tolist(), numbers.tolist(), strict=True)
    ]
    return Layout((first.index_select(0, group) + index) * size, total * size, [Block(0, size, total)], runs)


def _codes(
    index: Tensor, bucket: Tensor, group: Tensor, numbers: Tensor, order: Order, *, size: int, across: bool
) -> Tensor:
    """Twice the number of every sorted token's chunk in its lane, buckets two apart unless they reach ``across``."""
    lanes = numbers.unflatten(-1, (order.lanes, -1))
    chunk = (lanes.cumsum(-1) - lanes).flatten(1).gather(-1, group) + index
    if not across:
        chunk = chunk + 2 * (bucket % order.wide)
    largest = -(-index.shape[-1] // (size * order.lanes)) + 4 * order.wide
    return (2 * chunk).to(torch.int16 if largest < SMALL else torch.int32)
