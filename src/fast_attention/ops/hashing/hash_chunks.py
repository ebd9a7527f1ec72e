"""Hashed tokens cut into chunks of slots: which token stands in which slot, and which chunks meet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

SMALL = 2**14  # codes below this are compared, doubled, as int16


class Chunks(NamedTuple):
    """One round of hashing of T tokens: n chunks of slots, each of one stretch (a bucket, or a whole row)."""

    table: Tensor  # (n, size): the token in every slot; empty slots repeat the first of their chunk
    valid: Tensor  # (n, size): 1 where a slot holds a token of its own, else 0
    runs: list[tuple[int, int, int]]  # (c, b, m): the chunks from c to c + m have those from b before them
    back: Tensor  # (T,): the slot of every token; most * size where it is masked
    code: Tensor  # (T,): twice a number; i reaches j where the numbers differ by 0 or 1
    most: int  # chunks of any round


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
    chunk, numbers, runs = _laid(level, stretch, pieces)
    most = max(numbers)
    slot = (chunk * size + rank % size).masked_fill_(masked, most * size)
    token = order.token.view_as(held)
    back, codes = (torch.empty_like(x).scatter_(1, token, x) for x in (slot, code))
    table = token.new_zeros(rounds, most * size + 1).scatter_(1, slot, token)[:, :-1].unflatten(1, (most, size))
    valid = table.new_zeros(rounds, most * size + 1, dtype=dtype).scatter_(1, slot, 1.0)[:, :-1].view_as(table)
    table = torch.where(valid > 0, table, table[..., :1])
    return [
        Chunks(table[r, :n], valid[r, :n], runs[r], back[r], codes[r], most) for r, n in enumerate(numbers)
    ]  # fmt: skip


def _laid(level: Tensor, stretch: Tensor, pieces: Tensor) -> tuple[Tensor, list[int], list[list[tuple[int, int, int]]]]:
    """Every token's chunk (rounds, T), the chunks of every round, and the runs of chunks with others before them.

    The first chunks of all stretches come first, the longest stretch leading, then all second ones, and so on: those
    before a level's chunks then stand in one row, as many as there are. Where few stretches are long, their chunks
    stand one after the other instead, so that the runs are few in any case.
    """
    levels, numbers = int(pieces.max()), pieces.sum(-1).tolist()
    if levels <= int((pieces > 1).sum(-1).max()) + 1:
        sorted_pieces, order = pieces.sort(dim=-1, descending=True, stable=True)
        place = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order))
        wide = (sorted_pieces[:, None, :] > torch.arange(levels)[:, None]).sum(-1)  # (rounds, levels)
        first = wide.cumsum(-1) - wide
        chunk = first.gather(-1, level.clamp(max=max(levels - 1, 0))) + place.gather(-1, stretch) if levels else level
        each = [list(zip(a[1:], a, n[1:], strict=False)) for a, n in zip(first.tolist(), wide.tolist(), strict=True)]
        return chunk, numbers, [[run for run in runs if run[2]] for runs in each]
    first = pieces.cumsum(-1) - pieces
    each = [
        [(a + 1, a, n - 1) for a, n in zip(*row, strict=True) if n > 1]
        for row in zip(first.tolist(), pieces.tolist(), strict=True)
    ]
    return first.gather(-1, stretch) + level, numbers, each


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
