"""Reads a prompt over processes: outputs of every process's tokens, and the state after all of them on each.

States of constant size are combined; others are made head by head, and every process gets the heads of all.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fast_attention import decoding
from fast_attention.decoding import State
from fast_attention.engine.precision import rebuild
from fast_attention.engine.tracing import replaced
from fast_attention.mechanisms.hybrid.adapted import Adapted
from fast_attention.mechanisms.hybrid.by_length import ByLength
from fast_attention.parallel import collectives, heads, states
from fast_attention.parallel.strategy import Call


def decode(call: Call, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
    """This process's outputs (..., H, N, Ev) after ``state``, and the state after the tokens of all processes."""
    constant = call.mechanism.traits.memory == "constant" and not getattr(call.mechanism, "clamp", None)
    return _combined(call, q, k, v, state) if constant else _by_heads(call, q, k, v, state)


def _combined(call: Call, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
    mechanism = call.mechanism
    states.check_length(call, decoding.validated(state, decoding.empty(mechanism, q, k, v, call.w)))
    every, received = states.gathered(call, k, v)
    before = _total(mechanism, [state, *every[: call.shards.rank]])
    out, _ = mechanism.decode(q, k, v, call.w, before, key_mask=call.key_mask)
    return collectives.with_gradient(out, received), _total(mechanism, [state, *every])


def _total(mechanism: Any, parts: list[State | None]) -> Any:
    """The state of all parts; None where there are none."""
    there = [part for part in parts if part is not None]
    return reduce(mechanism.combine, there) if there else None


def _by_heads(call: Call, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
    mechanism, shards = call.mechanism, call.shards
    whole = decoding.empty(mechanism, q, k, v, call.w)
    held = decoding.validated(state, whole)
    part, inputs = heads.transposed(call, q, k, v)
    empty = decoding.empty(part.mechanism, inputs[0], inputs[1], inputs[2], part.w)
    axes = _head_axes(mechanism, (call.w, q, k, v), (part.w, *inputs))
    before = None if held is None else replaced(empty, held=_cut(held, axes, shards.rank, empty.heads))
    out, after = part.mechanism.decode(*inputs, part.w, before, key_mask=part.key_mask)
    return heads.to_sequence(out, shards.queries, shards), replaced(whole, held=_joined(after.held, axes, shards.group))


def _head_axes(mechanism: Any, *calls: tuple[Any, ...]) -> Any:
    """For every tensor of a state the axis of heads, or None: seen in states of a few tokens of all and of some."""
    return reduce(_either, (_axes_after(mechanism, number, calls) for number in {1, _above(mechanism) + 1}))


def _above(mechanism: Any) -> int:
    """After how many tokens a state may have other parts than at the start."""
    if isinstance(mechanism, Adapted):
        return _above(mechanism.mechanism)
    if isinstance(mechanism, ByLength):
        return max(mechanism.above, _above(mechanism.short), _above(mechanism.long))
    return 0


def _axes_after(mechanism: Any, number: int, calls: tuple[tuple[Any, ...], ...]) -> Any:
    with torch.no_grad():
        whole, part = (
            mechanism.decode(*(x.new_zeros(*x.shape[:-2], number, x.shape[-1]) for x in inputs), w)[1].held
            for w, *inputs in calls
        )

    def axes(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return next((i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n), None)
        return tuple(map(axes, a, b)) if isinstance(a, tuple) else None

    return axes(whole, part)


def _either(one: Any, other: Any) -> Any:
    """The axes of two states, either of which may lack parts."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(map(_either, one, other))
    return other if one is None else one


def _cut(held: Any, axes: Any, rank: int, number: int) -> Any:
    """A process's heads of a state."""
    if isinstance(held, Tensor):
        return held if axes is None else held.narrow(axes, rank * number, number)
    return rebuild(held, [_cut(*each, rank, number) for each in zip(held, axes, strict=True)]) if held else held


def _joined(held: Any, axes: Any, group: Any) -> Any:
    """A state with the heads of all processes."""
    if isinstance(held, Tensor):
        if axes is None:
            return held
        everyone = collectives.all_gather(held.to(torch.uint8) if held.dtype == torch.bool else held, group)
        return torch.cat(list(everyone), axes).to(held.dtype)
    if not isinstance(held, tuple):
        return held
    return rebuild(held, [_joined(*each, group) for each in zip(held, axes, strict=True)])
