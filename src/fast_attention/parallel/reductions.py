"""Spreads Linformer: every process projects its keys and values, and the partial products are summed over processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.precision import in_float32
from fast_attention.mechanisms.dense.linformer import Linformer
from fast_attention.mechanisms.dense.projections import LearnedProjection
from fast_attention.mechanisms.dense.reference import attend_slots
from fast_attention.parallel import collectives
from fast_attention.parallel.strategy import Call, Sizes, Strategy


def serves(mechanism: Any) -> bool:
    """Whether slots are sums over tokens with weights by their positions."""
    return isinstance(mechanism, Linformer) and isinstance(mechanism.projection, LearnedProjection)


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, from the slots of all processes' tokens."""
    mechanism, shards, w = call.mechanism, call.shards, call.w
    assert isinstance(mechanism, Linformer)
    mechanism.within(shards.num_keys, w.E.shape[-1])
    mask = None if call.key_mask is None else call.key_mask[..., None, :]
    return _attend(q, k, v, w.E, w.E if w.F is None else w.F, mask, first=shards.key_start, group=shards.group)


@in_float32
def _attend(
    q: Tensor, k: Tensor, v: Tensor, E: Tensor, F: Tensor, mask: Tensor | None, *, first: int, group: Any
) -> Tensor:
    columns = slice(first, first + k.shape[-2])
    keys, values = E[..., columns] @ masks.drop(k, mask), F[..., columns] @ masks.drop(v, mask)
    slots = collectives.all_reduce(torch.cat([keys, values], -1), group)
    keys, values = slots.split([k.shape[-1], v.shape[-1]], -1)
    return attend_slots(q, keys, values, None)


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: a sum of keys' and values' slots, as a ring sends it."""
    assert isinstance(call.mechanism, Linformer)
    slots = sizes.batch * sizes.heads * call.mechanism.rank * (sizes.width + sizes.values)
    return collectives.reduced(slots, call.shards.world) * max(sizes.itemsize, 4)


SLOTS = Strategy("slots", "one all-reduce of keys' and values' slots", attend, sends)
