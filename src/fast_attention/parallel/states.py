"""Spreads mechanisms whose state has constant size: only states are sent (LASP-2, Sun et al. 2025, arXiv 2502.07563).

Causal: one all-gather, and each process reads from what the shards before its own combine to. Else: one all-reduce by
``combine``, from which every query reads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.decoding import State
from fast_attention.engine.precision import rebuild
from fast_attention.mechanisms.linear.cosformer import CosFormer
from fast_attention.parallel import collectives
from fast_attention.parallel.heads import of_heads
from fast_attention.parallel.strategy import Call, Sizes, Strategy

LONG = 1024  # tokens of a process from which on states are sent while others are summed


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, from the state of what its queries see on other processes."""
    if call.is_causal:
        return _causal(call, q, k, v)
    total, received = everything(call, k, v)
    out = call.mechanism.read(q, k, v, call.w, total, key_mask=call.key_mask)
    return collectives.with_gradient(out, received)


def _causal(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Outputs after what earlier processes' states combine to.

    One half of the heads is summed while the states of the other are under way, and read while its own are.
    """
    check_length(call)
    heads, shards, parts = q.shape[-3], call.shards, 2 if _is_long(call, q) else 1
    calls = [call]
    if parts == 2:
        halves = (replace(shards, rank=i, queries=(1, 1)) for i in range(2))
        calls = [of_heads(call, heads, half) for half in halves]
    inputs = list(zip(*(x.split(heads // parts, -3) for x in (q, k, v)), strict=True))
    flights = [_depart(each, k_part, v_part) for each, (_, k_part, v_part) in zip(calls, inputs, strict=True)]
    outs = []
    for each, tensors, (like, flat, flight) in zip(calls, inputs, flights, strict=True):
        rows = flight.landed(flat)
        states = [unpacked(like, row) for row, n in zip(rows[: shards.rank], shards.keys, strict=False) if n]
        before = reduce(call.mechanism.combine, states) if states else None
        out, _ = call.mechanism.decode(*tensors, each.w, before, key_mask=call.key_mask)
        outs.append(collectives.with_gradient(out, rows))
    return torch.cat(outs, -3) if parts == 2 else outs[0]


def check_length(call: Call, before: Any = None) -> None:
    """Raise on all processes, not only on those behind it, where tokens after a state go beyond CosFormer's longest."""
    if isinstance(call.mechanism, CosFormer):
        start = 0 if before is None else before.position(call.w)
        call.mechanism.within(start + call.shards.num_keys, call.w.number)


def _depart(call: Call, k: Tensor, v: Tensor) -> tuple[State, Tensor, collectives.Flight]:
    """This process's own state and its numbers, which are on their way to all others."""
    flight, (state, flat) = collectives.Flight(call.shards.group), _flat(call, k, v)
    return state, flight.started(flat), flight


def _is_long(call: Call, q: Tensor) -> bool:
    """Whether there is enough to compute while states are under way."""
    return q.shape[-3] % 2 == 0 and call.shards.length >= LONG * call.shards.world


def gathered(call: Call, k: Tensor, v: Tensor) -> tuple[list[State | None], Tensor]:
    """The state of every process's tokens, None of one without, and the tensor of which they are made."""
    like, flat = _flat(call, k, v)
    rows = collectives.all_gather(flat, call.shards.group)
    return [unpacked(like, row) if n else None for row, n in zip(rows, call.shards.keys, strict=True)], rows


def everything(call: Call, k: Tensor, v: Tensor) -> tuple[State, Tensor]:
    """The state of all processes' tokens, equal on all of them, and the tensor of which it is made.

    In rounds of ``combine`` with the process whose number differs in one bit; each round sends one state. Where the
    number of processes is no power of 2, states are gathered instead.
    """
    shards, combine = call.shards, call.mechanism.combine
    if _uneven(call):
        states, rows = gathered(call, k, v)
        return reduce(combine, [each for each in states if each is not None]), rows
    state, _ = _flat(call, k, v)
    step = 1
    while step < shards.world:
        partner = shards.rank ^ step
        other = unpacked(state, collectives.swap(packed(state), partner, shards.group))
        state = combine(state, other) if shards.rank < partner else combine(other, state)
        step *= 2
    return state, packed(state)


def _uneven(call: Call) -> bool:
    """Whether processes cannot all be paired in every round: they are no power of 2, or some have no token."""
    world = call.shards.world
    return bool(world & (world - 1)) or 0 in call.shards.keys


def _flat(call: Call, k: Tensor, v: Tensor) -> tuple[State, Tensor]:
    """This process's own state, and its numbers; that of a masked token where it has none."""
    mask = call.key_mask
    if not k.shape[-2]:
        k, v = one_token(k), one_token(v)
        mask = torch.zeros(*k.shape[:-3], 1, dtype=torch.bool, device=k.device)
    state = call.mechanism.summarise(k, v, call.w, key_mask=mask)
    return state, packed(state)


def one_token(x: Tensor) -> Tensor:
    """A token of zeros where there is none, with a gradient, which its process must pass on like all others."""
    return F.pad(x, (0, 0, 0, 1))


def packed(state: Any) -> Tensor:
    """The numbers of a state, any tree of tuples, in one row."""
    tensors = leaves(state)
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return torch.cat([x.reshape(-1).to(dtype) for x in tensors])


def unpacked(state: Any, flat: Tensor) -> Any:
    """A state like another, with the numbers of a row."""
    tensors = leaves(state)
    parts = iter([
        part.view_as(x).to(x.dtype) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)
    ])  # fmt: skip

    def filled(node: Any) -> Any:
        if isinstance(node, Tensor):
            return next(parts)
        return rebuild(node, [filled(each) for each in node]) if isinstance(node, tuple) else node

    return filled(state)


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree of tuples."""
    if isinstance(tree, Tensor):
        return [tree]
    return [x for part in tree for x in leaves(part)] if isinstance(tree, tuple) else []


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: a state to every other process, or one in each round."""
    world = call.shards.world
    rounds = world - 1 if call.is_causal or _uneven(call) else world.bit_length() - 1
    return rounds * bytes_of_state(call, sizes)


def bytes_of_state(call: Call, sizes: Sizes) -> int:
    """Bytes of one state, whose sizes one token shows."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[sizes.itemsize]
    like = next(iter(leaves(call.w)), torch.empty(0))
    k, v = (torch.zeros(sizes.batch, sizes.heads, 1, n, dtype=dtype, device=like.device)
            for n in (sizes.width, sizes.values))  # fmt: skip
    with torch.no_grad():
        flat = packed(call.mechanism.summarise(k, v, call.w))
    return flat.numel() * flat.element_size()


STATES = Strategy("states", "one all-gather of states if causal, else one all-reduce", attend, sends)
