"""Spreads Linformer: every process projects its keys and values, and the partial products are summed over processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.precision import in_float32
from fast_attention.mechanisms.dense.linformer import Linformer
from fast_attention.mechanisms.dense.projections import Convolution, LearnedProjection, MeanPool
from fast_attention.mechanisms.dense.reference import attend_slots
from fast_attention.parallel import collectives
from fast_attention.parallel.shards import Shards
from fast_attention.parallel.strategy import Call, Sizes, Strategy


def serves(mechanism: Any) -> bool:
    """Whether slots are sums over tokens with weights by their positions, or by their ranks among visible ones."""
    summed = LearnedProjection | MeanPool | Convolution
    return isinstance(mechanism, Linformer) and isinstance(mechanism.projection, summed)


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, from the slots of all processes' tokens."""
    mechanism, shards, w = _mechanism(call), call.shards, call.w
    limit = mechanism.projection.limit(w, mechanism.rank)
    if limit is not None:
        mechanism.within(shards.num_keys, limit)
    mask = None if call.key_mask is None else call.key_mask.expand(*k.shape[:-3], -1)[..., None, :]
    if isinstance(mechanism.projection, MeanPool):
        return _pooled(q, k, v, mask, rank=mechanism.rank, shards=shards)
    if isinstance(mechanism.projection, Convolution):
        return _convolved(q, k, v, w.E, w.F, mask, shards=shards)
    return _learned(q, k, v, w.E, w.E if w.F is None else w.F, mask, shards=shards)


@in_float32
def _learned(q: Tensor, k: Tensor, v: Tensor, E: Tensor, F: Tensor, mask: Tensor | None, *, shards: Shards) -> Tensor:
    columns = slice(shards.key_start, shards.key_start + k.shape[-2])
    keys, values = _sums(shards, E[..., columns] @ masks.drop(k, mask), F[..., columns] @ masks.drop(v, mask))
    return attend_slots(q, keys, values, None)


@in_float32
def _pooled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, rank: int, shards: Shards) -> Tensor:
    """Of n visible tokens, the r-th of the whole sequence goes to slot ``floor(r rank / n)``."""
    if mask is None:
        total = torch.tensor([shards.num_keys], device=k.device)
        order = torch.arange(shards.key_start, shards.key_start + k.shape[-2], device=k.device)
    else:
        visible = collectives.all_gather(mask.sum(-1, keepdim=True), shards.group)
        total, order = visible.sum(0), visible[: shards.rank].sum(0) + mask.cumsum(-1) - 1
    slot = (order * rank // total.clamp(min=1)).clamp(min=0)
    keys, values = _sums(shards, *(_collected(masks.drop(x, mask), slot, rank) for x in (k, v)))
    count = ((torch.arange(rank + 1, device=k.device) * total + rank - 1) // rank).diff()
    keys, values = (x / count.clamp_min(1)[..., None] for x in (keys, values))
    return attend_slots(q, keys, values, count.to(q.dtype)[..., None, :])


@in_float32
def _convolved(q: Tensor, k: Tensor, v: Tensor, E: Tensor, F: Tensor, mask: Tensor | None, *, shards: Shards) -> Tensor:
    stride = E.shape[-1]
    position = torch.arange(shards.key_start, shards.key_start + k.shape[-2], device=k.device)
    weighted = [masks.drop(x, mask) * w[:, position % stride, None] for x, w in ((k, E), (v, F))]
    if mask is not None:
        weighted.append(mask[..., None].to(k.dtype).expand(*k.shape[:-1], 1))
    slots = -(-shards.num_keys // stride)
    keys, values, *visible = _sums(shards, *(_collected(x, position // stride, slots) for x in weighted))
    count = visible[0].detach().mT > 0.5 if visible else torch.ones(1, slots, device=k.device)
    return attend_slots(q, keys, values, count.to(q.dtype))


def _collected(x: Tensor, slot: Tensor, slots: int) -> Tensor:
    """The sums of those tokens of (..., S, E) that ``slot`` (..., S) sends to the same slot."""
    return x.new_zeros(*x.shape[:-2], slots, x.shape[-1]).scatter_add(-2, slot[..., None].expand_as(x), x)


def _sums(shards: Shards, *parts: Tensor) -> list[Tensor]:
    """The sums over processes of each (..., slots, E)."""
    return list(collectives.all_reduce(torch.cat(parts, -1), shards.group).split([x.shape[-1] for x in parts], -1))


def _mechanism(call: Call) -> Linformer:
    assert isinstance(call.mechanism, Linformer)
    return call.mechanism


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: a sum of keys' and values' slots, as a ring sends it; with a mask what a slot or a process sees."""
    mechanism, shards = _mechanism(call), call.shards
    slots, width, counts = mechanism.rank, sizes.width + sizes.values, 0
    if isinstance(mechanism.projection, Convolution):
        slots, width = -(-shards.num_keys // call.w.E.shape[-1]), width + call.masked
    elif isinstance(mechanism.projection, MeanPool) and call.masked:
        counts = (shards.world - 1) * sizes.batch * 8
    return counts + collectives.reduced(sizes.batch * sizes.heads * slots * width, shards.world) * max(
        sizes.itemsize, 4
    )


SLOTS = Strategy("slots", "one all-reduce of keys' and values' slots", attend, sends)
