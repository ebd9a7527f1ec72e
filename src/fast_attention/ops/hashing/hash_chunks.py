"""Hashed tokens cut into chunks of slots: which token stands in which slot, and which chunks meet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

SMALL = 2**14  # codes below this are compared, doubled, as int16


class Chunks(NamedTuple):
    """One round of hashing of T tokens: n chunks of slots, each of one stretch (a bucket, or a whole row)."""

    table: Tensor  # (n, size): the token in every slot; empty slots repeat the first of their chunk
    valid: Tensor  # (n, size): 1 where a slot holds a token of its own, else 0
    later: Tensor  # (m,): the chunks that have another before them in their stretch
    back: Tensor  # (T,): the slot of every token; n * size where it is masked
    code: Tensor  # (T,): twice a number; i reaches j where the numbers differ by 0 or 1


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
    held, wide, rows = order.held, order.wide, order.rounds * order.lanes
    length = len(held) // rows
    full = torch.bincount(held, minlength=rows * wide).view(rows, wide)
    ends = full.flatten().cumsum(0).view(rows, wide)
    if ranked:
        starts, counts = (ends - full).flatten(), full.index_fill(-1, torch.tensor([wide - 1]), 0).flatten()
    else:
        starts, counts = torch.arange(rows, device=held.device) * length, full[:, :-1].sum(-1)
    pieces = (counts + size - 1) // size
    first = pieces.cumsum(0) - pieces
    of_round = pieces.view(order.rounds, -1).sum(-1)
    base = of_round.cumsum(0) - of_round  # the first chunk of each round
    shift = (first - base.repeat_interleave(len(pieces) // order.rounds)) * size - starts
    slot = _slots(held, shift if ranked else shift.repeat_interleave(wide), of_round * size, wide=wide)
    code = _codes(held, slot, size=size, wide=wide, rows=rows, across=across)
    back, codes = (torch.empty_like(x).scatter_(1, order.token.view_as(x), x) for x in (slot, code.view_as(slot)))
    table, valid, later = _tables(order.token, pieces, first, starts, counts, size=size)
    valid, sizes = valid.to(dtype), of_round.tolist()
    laters = [part.nonzero().squeeze(-1) for part in later.split(sizes)]
    return [Chunks(*one) for one in zip(table.split(sizes), valid.split(sizes), laters, back, codes, strict=True)]


def _slots(held: Tensor, shift: Tensor, outside: Tensor, *, wide: int) -> Tensor:
    """(rounds, T): the slot of every sorted token within its round, ``outside`` (rounds,) where masked."""
    masked = torch.arange(len(shift), device=held.device) % wide == wide - 1
    place = torch.arange(len(held), device=held.device)
    slot = (place + shift.masked_fill(masked, 2**62).index_select(0, held)).view(len(outside), -1)
    return torch.minimum(slot, outside[:, None])


def _codes(held: Tensor, slot: Tensor, *, size: int, wide: int, rows: int, across: bool) -> Tensor:
    """Twice the number of every sorted token's chunk, buckets two apart unless they reach ``across`` each other."""
    chunk = torch.div(slot, size, rounding_mode="floor").view(rows, -1)
    length = chunk.shape[-1]
    chunk = chunk - chunk[:, :1]
    if not across:
        chunk = chunk + 2 * (held.view(rows, length) % wide)
    largest = -(-length // size) + 4 * wide
    return (2 * chunk).flatten().to(torch.int16 if largest < SMALL else torch.int32)


def _tables(
    token: Tensor, pieces: Tensor, first: Tensor, starts: Tensor, counts: Tensor, *, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens in every slot (n, size), which slots are taken, and which chunks have one before them (n,)."""
    stretch = torch.arange(len(pieces), device=token.device).repeat_interleave(pieces)
    nth = torch.arange(len(stretch), device=token.device) - first.index_select(0, stretch)
    begin = starts.index_select(0, stretch) + nth * size
    left = counts.index_select(0, stretch) - nth * size
    place = torch.arange(size, device=token.device)
    valid = place < left[:, None]
    where = begin[:, None] + place * valid
    return token.index_select(0, where.flatten()).view_as(where), valid, nth > 0
