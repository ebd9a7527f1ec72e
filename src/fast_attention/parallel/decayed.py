"""Spreads decayed attention where it is not causal: two states of every shard, as later and as earlier tokens see it.

Each process sends the one to the processes behind it and the other to those before it, in one all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fast_attention import checks
from fast_attention.mechanisms.linear.decayed_sums import Sides
from fast_attention.parallel import collectives, states
from fast_attention.parallel.strategy import Call, Sizes, Strategy


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, between the sums of the tokens before its own and of those after."""
    mechanism: Any = call.mechanism
    k, v, mask = checks.without_masked(k, v, call.key_mask, mechanism.traits.reads)
    w = checks.weights(mechanism, call.w, q)
    sides, received = _exchanged(call, k, v, w, mask)
    if q.shape[-2]:
        out = mechanism.attend_between(q, k, v, w, sides, key_mask=mask)
    else:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    return collectives.with_gradient(out, received)


def _exchanged(call: Call, k: Tensor, v: Tensor, w: Any, mask: Tensor | None) -> tuple[Sides, Tensor]:
    """What is on both sides of this process's tokens, and the tensor of which it is made."""
    shards, mechanism = call.shards, call.mechanism
    if not k.shape[-2]:  # one masked token adds nothing
        k, v = states.one_token(k), states.one_token(v)
        mask = torch.zeros(*k.shape[:-3], 1, 1, dtype=torch.bool, device=k.device)
    both = mechanism.sides(k, v, w, key_mask=mask)  # type: ignore[attr-defined]
    to_later, to_earlier = (states.packed(each) for each in both)
    size, before, after = len(to_later), shards.rank, shards.world - 1 - shards.rank
    sizes = [size * (rank != shards.rank) for rank in range(shards.world)]
    flat = torch.cat([*[to_earlier] * before, *[to_later] * after])
    received = collectives.all_to_all(flat, sizes, sizes, shards.group)
    others = [states.unpacked(both.before, row) for row in received.view(-1, size)]
    return Sides(_joined(call, others[:before]), _joined(call, others[before:][::-1])), received


def _joined(call: Call, parts: Sequence[Any]) -> Any:
    """The sums of several shards, the farthest first; None where there are none."""
    return reduce(call.mechanism.merged, parts) if parts else None


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: one state to every other process."""
    return (call.shards.world - 1) * states.bytes_of_state(call, sizes)


DECAYED = Strategy("states of both sides", "one all-to-all of states", attend, sends)
