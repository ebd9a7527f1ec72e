"""The state of decoding among hashed tokens: the last two chunks of every bucket and round."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fast_attention.ops import masks
from fast_attention.ops.hashing import Tokens, ranks


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


def step(
    q: Tokens, k: Tokens, v: Tokens, bucket: Int[Tensor, "..."], seen: Bool[Tensor, "..."], memory: HashMemory,
    *, distinct: bool,
) -> Tensor:  # fmt: skip
    """The output (..., H, 1, Ev) of the next token, with buckets (..., H, rounds, 1). Writes ``memory`` in place."""
    slots = memory.place.shape[-1]
    rank, lane = memory.filled.gather(-1, bucket), bucket[..., None]
    place = memory.place.take_along_dim(lane, -2)[..., 0, :]
    ranks_held = rank - 1 - (rank - 1 - torch.arange(slots, device=q.device)) % slots
    reached = (place >= 0) & (ranks_held // (slots // 2) >= rank // (slots // 2) - 1)
    if distinct:
        reached = reached & ~_named_before(place, reached)
    keys, values = (x.take_along_dim(lane[..., None], -3)[..., 0, :, :].flatten(-3, -2) for x in memory[:2])
    reached = reached.flatten(-2)[..., None, :]
    out = masks.masked_softmax(q @ keys.mT, reached) @ values
    out = torch.where(reached.any(-1, keepdim=True), out, v).masked_fill(~seen[..., None], 0.0)
    at, written = bucket * slots + rank % slots, seen[..., None, :]
    for room, new in ((memory.k, k), (memory.v, v), (memory.place[..., None], memory.length)):
        flat, index = room.flatten(-3, -2), at[..., None].expand(*at.shape, room.shape[-1])
        new = new if new.ndim == 0 else new[..., None, :, :]
        flat.scatter_(-2, index, torch.where(written[..., None], new, flat.gather(-2, index)))
    memory.filled.scatter_add_(-1, bucket, written.expand_as(bucket).long())
    memory.length.add_(1)
    return out


def _named_before(place: Tensor, reached: Tensor) -> Tensor:
    """Which of the slots (..., rounds, 2 m) hold a token that an earlier slot holds too."""
    flat = place.masked_fill(~reached, -1).flatten(-2)
    ordered, order = flat.sort(dim=-1, stable=True)
    again = torch.cat([torch.zeros_like(ordered[..., :1], dtype=torch.bool), ordered[..., 1:] == ordered[..., :-1]], -1)
    return torch.zeros_like(again).scatter(-1, order, again).view_as(place)
