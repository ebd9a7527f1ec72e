"""The state of decoding among hashed tokens: the last two chunks of every bucket and round."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fast_attention.ops import masks
from fast_attention.ops.hashing.hashing import Tokens, ranks


class HashMemory(NamedTuple):
    """Of every round and bucket the last 2 m tokens; the token of rank r in its bucket lies in slot r mod 2 m."""

    k: Tensor  # (..., H, rounds, buckets, 2 m, E)
    v: Tensor  # (..., H, rounds, buckets, 2 m, Ev)
    place: Tensor  # (..., H, rounds, buckets, 2 m): the tokens' numbers, which tell them apart; -1 is an empty slot
    filled: Tensor  # (..., H, rounds, buckets): how many tokens each bucket has had
    length: Tensor  # (): how many tokens there have been


def remember(k: Tokens, v: Tokens, bucket: Int[Tensor, "..."], *, number: int, size: int) -> HashMemory:
    """The memory after a first stretch with buckets (..., H, rounds, L); bucket ``number`` holds what is masked."""
    slots = 2 * size
    held, order = bucket.sort(dim=-1, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, ranks(held))
    filled = torch.zeros_like(bucket[..., :1]).expand(*bucket.shape[:-1], number + 1)
    filled = filled.scatter_add(-1, bucket, torch.ones_like(bucket))
    kept = (bucket < number) & (rank >= filled.gather(-1, bucket) - slots)
    slot = torch.where(kept, bucket * slots + rank % slots, number * slots)[..., None]
    places = torch.arange(bucket.shape[-1], device=bucket.device).expand_as(bucket)

    def stored(x: Tensor, outside: int = 0) -> Tensor:
        x = x.expand(*slot.shape[:-1], x.shape[-1])
        room = x.new_full((*slot.shape[:-2], number * slots + 1, x.shape[-1]), outside)
        return room.scatter(-2, slot.expand_as(x), x)[..., :-1, :].unflatten(-2, (number, slots))

    place = stored(places[..., None], -1)[..., 0]
    length = torch.tensor(bucket.shape[-1], device=bucket.device)
    return HashMemory(stored(k[..., None, :, :]), stored(v[..., None, :, :]), place, filled[..., :-1], length)


def copied(memory: HashMemory) -> HashMemory:
    """A copy that ``step`` may write into."""
    return HashMemory(*(part.clone(memory_format=torch.contiguous_format) for part in memory))


def step(
    q: Tokens, k: Tokens, v: Tokens, bucket: Int[Tensor, "..."], seen: Bool[Tensor, "..."], memory: HashMemory,
    *, distinct: bool,
) -> Tensor:  # fmt: skip
    """The output (..., H, 1, Ev) of the next token, with buckets (..., H, rounds, 1). Writes ``memory`` in place."""
    lead, (number, slots) = bucket.shape[:-1], memory.place.shape[-2:]
    lane = (torch.arange(lead.numel(), device=q.device).view(*lead, 1) * number + bucket).flatten()
    rank = memory.filled.gather(-1, bucket)
    keys, values, place = (part.flatten(0, len(lead)).index_select(0, lane).unflatten(0, lead) for part in memory[:3])
    ranks_held = rank - 1 - (rank - 1 - torch.arange(slots, device=q.device)) % slots
    reached = (place >= 0) & (ranks_held // (slots // 2) >= rank // (slots // 2) - 1)
    if distinct:
        reached = reached & ~_named_before(place, reached)
    reached = reached.flatten(-2)[..., None, :]
    out = masks.masked_softmax(q @ keys.flatten(-3, -2).mT, reached) @ values.flatten(-3, -2)
    out = torch.where(reached.any(-1, keepdim=True), out, v).masked_fill(~seen[..., None], 0.0)
    slot, written = rank % slots, seen[..., None, :]
    for room, held, new in zip(
        memory, (keys, values, place[..., None]), (k, v, memory.length.view(1, 1)), strict=False
    ):
        old = held.gather(-2, slot[..., None].expand(*slot.shape, held.shape[-1]))
        new = torch.where(written[..., None], new[..., None, :, :], old).reshape(-1, held.shape[-1])
        room.view(-1, held.shape[-1]).index_copy_(0, lane * slots + slot.flatten(), new)
    memory.filled.scatter_add_(-1, bucket, written.expand_as(bucket).long())
    memory.length.add_(1)
    return out


def _named_before(place: Tensor, reached: Tensor) -> Tensor:
    """Which of the slots (..., rounds, 2 m) hold a token that an earlier slot holds too."""
    flat = place.masked_fill(~reached, -1).flatten(-2)
    ordered, order = flat.sort(dim=-1, stable=True)
    again = torch.cat([torch.zeros_like(ordered[..., :1], dtype=torch.bool), ordered[..., 1:] == ordered[..., :-1]], -1)
    return torch.zeros_like(again).scatter(-1, order, again).view_as(place)
