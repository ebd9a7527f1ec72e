"""Spreads mechanisms with a state of constant size: only states are sent (LASP-2, Sun et al. 2025, arXiv 2502.07563).

Every process summarises its shard, and one all-gather gives all states to all processes. Causal queries advance from
the combined states of the processes before their own; others read from the states of all.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from fast_attention.decoding import State
from fast_attention.parallel import collectives
from fast_attention.parallel.shards import Call, Sizes, Strategy


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, from the combined state of all that its queries see on other processes."""
    states, rows = _gathered(call, k, v)
    if call.is_causal:
        before = _total(call.mechanism, states[: call.shards.rank])
        out, _ = call.mechanism.decode(q, k, v, call.w, before, key_mask=call.key_mask)
    else:
        out = call.mechanism.read(q, k, v, call.w, _total(call.mechanism, states), key_mask=call.key_mask)
    return collectives.with_gradient(out, rows)


def decode(call: Call, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
    """This process's outputs after ``state``, and the state after the tokens of all processes."""
    states, rows = _gathered(call, k, v)
    before = _total(call.mechanism, [state, *states[: call.shards.rank]])
    out, _ = call.mechanism.decode(q, k, v, call.w, before, key_mask=call.key_mask)
    return collectives.with_gradient(out, rows), _total(call.mechanism, [state, *states])


def _gathered(call: Call, k: Tensor, v: Tensor) -> tuple[list[State | None], Tensor]:
    """The state of every process's tokens, None of one without, and the tensor of which they are made."""
    mask = call.key_mask
    if not k.shape[-2]:  # a masked token stands for none, so that gradients are passed on here as elsewhere
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        mask = torch.zeros(*k.shape[:-3], 1, dtype=torch.bool, device=k.device)
    state = call.mechanism.summarise(k, v, call.w, key_mask=mask)
    rows = collectives.all_gather(_packed(state), call.shards.group)
    return [_unpacked(state, row) if n else None for row, n in zip(rows, call.shards.keys, strict=True)], rows


def _total(mechanism: Any, states: list[State | None]) -> Any:
    """The combined state; None where there is none."""
    there = [state for state in states if state is not None]
    return reduce(mechanism.combine, there) if there else None


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree of tuples."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _packed(state: Any) -> Tensor:
    """The numbers of a state in one row."""
    tensors = leaves(state)
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return torch.cat([x.reshape(-1).to(dtype) for x in tensors])


def _unpacked(state: Any, row: Tensor) -> Any:
    """A state like another, with the numbers of a row."""
    parts = iter(row.split([x.numel() for x in leaves(state)]))
    return tree_map_only(Tensor, lambda x: next(parts).view_as(x).to(x.dtype), state)


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: a state, whose sizes one token shows, to every other process."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[sizes.itemsize]
    device = next(iter(leaves(call.w)), torch.empty(0)).device
    k, v = (torch.zeros(sizes.batch, sizes.heads, 1, n, dtype=dtype, device=device)
            for n in (sizes.width, sizes.values))  # fmt: skip
    with torch.no_grad():
        row = _packed(call.mechanism.summarise(k, v, call.w))
    return (call.shards.world - 1) * row.numel() * row.element_size()


STATES = Strategy("states", "one all-gather of states", attend, decode, sends)
