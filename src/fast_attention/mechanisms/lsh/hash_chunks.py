"""Hashed tokens cut into chunks of slots: which token stands in which slot, and which chunks meet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

PARTS = 2  # of a chunk: the last one of a stretch is as wide as needed, in whole parts; more parts, smaller products
SMALL = 2**14  # codes below this are compared, doubled, as int16


class Block(NamedTuple):
    """Chunks of one width that stand one after the other."""

    start: int  # the first one's first slot
    width: int
    number: int

    def of(self, x: Tensor) -> Tensor:
        """The rows of ``x`` (slots, ...) as (number, width, ...): a view."""
        return x[self.start : self.start + self.width * self.number].view(self.number, self.width, *x.shape[1:])

    def parts(self, most: int) -> Iterator[Block]:
        """The same, at most so many chunks at a time."""
        for a in range(0, self.number, most):
            yield Block(self.start + a * self.width, self.width, min(most, self.number - a))


class Chunks(NamedTuple):
    """One round of hashing of T tokens: n slots in chunks, each of one stretch (a bucket, or a whole row)."""

    table: Tensor  # (n,): the token in every slot; empty slots repeat the last before them in their chunk
    valid: Tensor  # (n,): 1 where a slot holds a token of its own, else 0
    blocks: list[Block]  # all chunks
    runs: list[tuple[Block, Block]]  # chunks, and those before them in their stretches
    back: Tensor  # (T,): the slot of every token; ``most`` where it is masked
    code: Tensor  # (T,): twice a number; i reaches j where the numbers differ by 0 or 1
    most: int  # slots of any round


class Order(NamedTuple):
    """Tokens of all rounds and lanes by bucket, then by position; a row of wide = buckets + 1 is a lane in a round."""

    held: Tensor  # (rounds T,): row * wide + bucket, rows round by round
    token: Tensor  # (rounds T,): which token stands where
    lanes: int
    rounds: int
    wide: int


@torch.no_grad()
def ordered(bucket: Int[Tensor, "lanes rounds length"], *, number: int, together: int) -> list[Order]:
    """The order of every ``together`` lanes, tokens numbered through them; one sort for all, which is fastest."""
    _, rounds, length = bucket.shape
    wide, sets = number + 1, bucket.split(together)
    rows = torch.arange(len(bucket) * rounds, device=bucket.device, dtype=torch.int32)[:, None]
    flat = torch.cat([part.transpose(0, 1).reshape(-1, length) for part in sets])
    helds, orders = (flat.int() + wide * rows).flatten().sort(stable=True)
    found, at = [], 0
    for part in sets:
        end = at + part.numel()
        before = torch.arange(at, end, length * len(part), device=bucket.device)[:, None]
        token = (orders[at:end].view(rounds, -1) - before).flatten()
        found.append(Order(helds[at:end] - at // length * wide, token, len(part), rounds, wide))
        at = end
    return found


@torch.no_grad()
def cut(order: Order, *, size: int, ranked: bool, across: bool, dtype: torch.dtype) -> list[Chunks]:
    """The chunks of every round.

    No chunk holds tokens of two lanes, nor, if ``ranked``, of two buckets; see ``hashing.arrange``. Masked tokens are
    in none. Time and memory O(rounds T).
    """
    held, wide, rounds = order.held.view(order.rounds, -1), order.wide, order.rounds
    full = torch.bincount(order.held, minlength=rounds * order.lanes * wide).view(rounds, -1, wide)
    real = full[..., :-1]
    ends = full.flatten().cumsum(0).view_as(full)
    base = torch.arange(rounds, device=held.device)[:, None] * (order.lanes * wide)
    bucket = held - base
    masked = bucket % wide == wide - 1
    if ranked:
        starts, counts, stretch = (ends - full).flatten(1), F.pad(real, (0, 1)).flatten(1), bucket
    else:
        starts, counts = ends[..., -1] - full.sum(-1), real.sum(-1)
        stretch = torch.div(bucket, wide, rounding_mode="floor")
    stretch = stretch.long()
    rank = torch.arange(order.held.numel(), device=held.device).view_as(held) - starts.gather(-1, stretch)
    level = torch.div(rank, size, rounding_mode="floor")
    pieces = (counts + size - 1) // size
    code = _codes(level, bucket, stretch, pieces, order, size=size, across=across)
    laid = [_laid(*row, size=size) for row in zip(level, stretch, counts, strict=True)]
    most = max(one.slots for one in laid)
    slot = torch.stack([one.base for one in laid]).add_(rank % size).masked_fill_(masked, most)
    token = order.token.view_as(held)
    back, codes = (torch.empty_like(x).scatter_(1, token, x) for x in (slot, code))
    table = token.new_zeros(rounds, most + 1).scatter_(1, slot, token)[:, :-1]
    valid = torch.zeros(rounds, most + 1, dtype=dtype).scatter_(1, slot, 1.0)[:, :-1]
    table = table.gather(1, torch.where(valid > 0, torch.arange(most), 0).cummax(1).values)
    return [
        Chunks(table[r, : one.slots], valid[r, : one.slots], one.blocks, one.runs, back[r], codes[r], most)
        for r, one in enumerate(laid)
    ]


class Laid(NamedTuple):
    """Where the chunks of a round stand."""

    base: Tensor  # (T,): the first slot of every sorted token's chunk
    slots: int
    blocks: list[Block]
    runs: list[tuple[Block, Block]]


def _laid(level: Tensor, stretch: Tensor, counts: Tensor, *, size: int) -> Laid:
    """The chunks of stretches of so many tokens (S,), such that those before some chunks stand in a row as they do.

    The first chunks of all stretches come first, the longest stretch leading, then all second ones, and so on; then
    the last chunks of the stretches that fill a part of one only: these are narrow, of whole parts.
    """
    parts = min(PARTS, size)
    unit, (ordered, order) = size // parts, counts.sort(descending=True, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    whole = (ordered + size - (parts - 1) * unit - 1) // size  # chunks of full width
    part = ((ordered - whole * size).clamp_(min=0) + unit - 1) // unit
    kinds, numbers = torch.unique_consecutive(whole * parts + part, return_counts=True)
    groups = [(kind // parts, kind % parts, n) for kind, n in zip(kinds.tolist(), numbers.tolist(), strict=True)]
    levels = groups[0][0] if groups else 0
    if levels > 1 + sum(n for whole, _, n in groups if whole > 1):
        return _long(level, stretch, (counts + size - 1) // size, size=size)
    wide = [sum(n for whole, _, n in groups if whole > at) for at in range(levels)]
    first = [0, *accumulate(wide)]
    blocks = [Block(0, size, first[-1])]
    runs = [
        (Block(b * size, size, n), Block(a * size, size, n))
        for a, b, n in zip(first, first[1:], wide[1:], strict=False)
    ]
    at, tails, ends = first[-1] * size, [0] * len(groups), [0, *accumulate(n for _, _, n in groups)]
    for width in range((parts - 1) * unit, 0, -unit):
        begin = at
        for g, (whole_chunks, some, n) in enumerate(groups):
            if some * unit == width:
                tails[g] = at - ends[g] * width
                if whole_chunks:
                    before = (first[whole_chunks - 1] + ends[g]) * size
                    runs.append((Block(at, width, n), Block(before, size, n)))
                at += n * width
        blocks.append(Block(begin, width, (at - begin) // width))
    tail = torch.tensor(tails).repeat_interleave(numbers) + torch.arange(len(place)) * (part * unit)
    mine = place.index_select(0, stretch)
    straight = (torch.tensor(first).index_select(0, level.clamp(max=levels)) + mine) * size
    base = torch.where(level < whole.index_select(0, mine), straight, tail.index_select(0, mine))
    return Laid(base, at, blocks, runs)


def _long(level: Tensor, stretch: Tensor, pieces: Tensor, *, size: int) -> Laid:
    """The chunks of few long stretches: one after the other, so that the runs are few."""
    first, total = pieces.cumsum(0) - pieces, int(pieces.sum())
    runs = [
        (Block((a + 1) * size, size, n - 1), Block(a * size, size, n - 1))
        for a, n in zip(first.tolist(), pieces.tolist(), strict=True)
    ]
    return Laid((first.index_select(0, stretch) + level) * size, total * size, [Block(0, size, total)], runs)


def _codes(
    level: Tensor, bucket: Tensor, stretch: Tensor, pieces: Tensor, order: Order, *, size: int, across: bool
) -> Tensor:
    """Twice the number of every sorted token's chunk in its lane, buckets two apart unless they reach ``across``."""
    lanes = pieces.unflatten(-1, (order.lanes, -1))
    chunk = (lanes.cumsum(-1) - lanes).flatten(1).gather(-1, stretch) + level
    if not across:
        chunk = chunk + 2 * (bucket % order.wide)
    largest = -(-level.shape[-1] // (size * order.lanes)) + 4 * order.wide
    return (2 * chunk).to(torch.int16 if largest < SMALL else torch.int32)
