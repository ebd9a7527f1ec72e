"""Decodes among hashed tokens: caches the last two chunks of every bucket and round, and a log of the latest tokens.

The chunks are large and the same for many tokens; what the latest tokens would change in them is in a short log, so
that a token copies the log only. A full log is written into a copy of the chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.tracing import replaced
from fast_attention.mechanisms.lsh.reference import Tokens, ranks

LOG = 64  # tokens: a copy of the chunks (68 MB by default) then costs a token 1 MB, and the log at most 0.3


class HashMemory(NamedTuple):
    """Of every round and bucket the last 2 m tokens; the token of rank r in its bucket is in slot r mod 2 m."""

    k: Tensor  # (..., H, rounds, buckets, 2 m, E)
    v: Tensor  # (..., H, rounds, buckets, 2 m, Ev)
    position: Tensor  # (..., H, rounds, buckets, 2 m): of the tokens; -1 is an empty slot
    filled: Tensor  # (..., H, rounds, buckets): how many tokens each bucket has had
    length: Tensor  # (): how many tokens there have been up to the log
    log_k: Tensor  # (..., H, LOG, E): the tokens since, in the first rows
    log_v: Tensor  # (..., H, LOG, Ev)
    log_bucket: Tensor  # (..., H, rounds, LOG); the number of buckets where masked or not written yet
    logged: Tensor  # (): how many rows are written


def remember(k: Tokens, v: Tokens, bucket: Int[Tensor, "..."], *, number: int, size: int) -> HashMemory:
    """The memory after the first tokens, with buckets (..., H, rounds, L); bucket ``number`` holds what is masked."""
    lead, slots = bucket.shape[:-1], 2 * size
    empty = HashMemory(
        k.new_zeros(*lead, number, slots, k.shape[-1]), v.new_zeros(*lead, number, slots, v.shape[-1]),
        bucket.new_full((*lead, number, slots), -1), bucket.new_zeros(*lead, number), bucket.new_zeros(()),
        k.new_zeros(*lead[:-1], LOG, k.shape[-1]), v.new_zeros(*lead[:-1], LOG, v.shape[-1]),
        bucket.new_full((*lead, LOG), number), bucket.new_zeros(()),
    )  # fmt: skip
    return _written(empty, k, v, bucket)


def _written(memory: HashMemory, k: Tensor, v: Tensor, bucket: Tensor) -> HashMemory:
    """Write new tokens into the chunks, in place; bucket ``number`` holds what is masked."""
    number, slots = memory.position.shape[-2:]
    ascending, order = bucket.sort(dim=-1, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, ranks(ascending))
    added = torch.zeros_like(bucket[..., :1]).expand(*bucket.shape[:-1], number + 1)
    added = added.scatter_add(-1, bucket, torch.ones_like(bucket))
    bucket_or_last = bucket.clamp(max=number - 1)
    kept = (bucket < number) & (rank >= added.gather(-1, bucket) - slots)  # the last token of a slot
    slot = bucket_or_last * slots + (rank + memory.filled.gather(-1, bucket_or_last)) % slots
    lanes = torch.arange(slot[..., 0].numel(), device=slot.device).view(*slot.shape[:-1], 1)
    where = (slot + lanes * (number * slots))[kept]
    position = torch.arange(bucket.shape[-1], device=bucket.device) + memory.length
    for chunks, new in zip(memory[:3], (k[..., None, :, :], v[..., None, :, :], position[:, None]), strict=True):
        width = chunks.shape[-1] if chunks.ndim > memory.position.ndim else 1
        new = new.expand(*bucket.shape, width)[kept]
        chunks.view(-1, width).index_copy_(0, where, new)
    filled, length = memory.filled + added[..., :-1], memory.length + bucket.shape[-1]
    return replaced(memory, filled=filled, length=length)


def flushed(memory: HashMemory, *, owned: bool) -> HashMemory:
    """Write the log into the chunks and empty it; in place where they are ``owned``: no other state holds them."""
    count = int(memory.logged)
    if not owned:
        k, v, position = (x.clone(memory_format=torch.contiguous_format) for x in memory[:3])
        memory = replaced(memory, k=k, v=v, position=position)
    k, v, bucket = memory.log_k[..., :count, :], memory.log_v[..., :count, :], memory.log_bucket[..., :count]
    memory = _written(memory, k, v, bucket)
    empty = torch.full_like(memory.log_bucket, memory.position.shape[-2])
    return replaced(memory, log_bucket=empty, logged=torch.zeros_like(memory.logged))


def step(
    q: Tokens, k: Tokens, v: Tokens, bucket: Int[Tensor, "..."], visible: Bool[Tensor, "..."], memory: HashMemory,
    *, distinct: bool,
) -> tuple[Tensor, HashMemory]:  # fmt: skip
    """The output (..., H, 1, Ev) of the next token, with buckets (..., H, rounds, 1), and the memory with it logged."""
    lead, (number, slots) = bucket.shape[:-1], memory.position.shape[-2:]
    lane = (torch.arange(lead.numel(), device=q.device).view(*lead, 1) * number + bucket).flatten()
    same_bucket = memory.log_bucket == bucket  # (..., H, rounds, LOG)
    filled, order = memory.filled.gather(-1, bucket), same_bucket.cumsum(-1)
    rank = filled + order[..., -1:]
    first = (rank // (slots // 2) - 1) * (slots // 2)  # the rank from which tokens are reached
    keys, values, position = (x.flatten(0, len(lead)).index_select(0, lane).unflatten(0, lead) for x in memory[:3])
    rank_of_slot = filled - 1 - (filled - 1 - torch.arange(slots, device=q.device)) % slots
    reached = (position >= 0) & (rank_of_slot >= first)
    recent = same_bucket & (filled + order - 1 >= first)
    times = recent.sum(-2)[..., None, :]  # (..., H, 1, LOG): in how many rounds
    if distinct:
        reached, times = reached & ~_in_earlier_slot(position, reached), times.clamp_(max=1)
    reached = torch.cat([reached.flatten(-2)[..., None, :], times > 0], -1)
    log_scores = q @ memory.log_k.mT + times.to(q.dtype).log()
    weights = masks.masked_softmax(torch.cat([q @ keys.flatten(-3, -2).mT, log_scores], -1), reached)
    in_chunks, in_log = weights.split([weights.shape[-1] - LOG, LOG], -1)
    out = in_chunks @ values.flatten(-3, -2) + in_log @ memory.log_v
    out = torch.where(reached.any(-1, keepdim=True), out, v).masked_fill(~visible[..., None], 0.0)
    return out, _logged(memory, k, v, torch.where(visible[..., None, :], bucket, number), visible)


def _logged(memory: HashMemory, k: Tensor, v: Tensor, bucket: Tensor, visible: Tensor) -> HashMemory:
    """Append one token to the log, a masked one as zeros."""
    at = memory.logged.view(1)
    k, v = (masks.drop(x, visible) for x in (k, v))
    return replaced(
        memory, log_k=memory.log_k.index_copy(-2, at, k), log_v=memory.log_v.index_copy(-2, at, v),
        log_bucket=memory.log_bucket.index_copy(-1, at, bucket), logged=memory.logged + 1,
    )  # fmt: skip


def _in_earlier_slot(position: Tensor, reached: Tensor) -> Tensor:
    """Which of the slots (..., rounds, 2 m) hold a token that an earlier slot holds too."""
    flat = position.masked_fill(~reached, -1).flatten(-2)
    ordered, order = flat.sort(dim=-1, stable=True)
    first = torch.zeros_like(ordered[..., :1], dtype=torch.bool)
    repeated = torch.cat([first, ordered[..., 1:] == ordered[..., :-1]], -1)
    return torch.zeros_like(repeated).scatter(-1, order, repeated).view_as(position)
