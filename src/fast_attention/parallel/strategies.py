"""The three ways to spread attention over processes: by states, by heads, by windows.

- States of constant size are the least: only they are sent (LASP-2, Sun et al. 2025, arXiv 2502.07563). Every process
  summarises its shard, and one all-gather gives all states to all. Causal queries advance from the combined states of
  the processes before their own; others read from the states of all.
- Heads are independent in every attention: between two transpositions each process has some heads of all tokens
  (Ulysses, Jacobs et al. 2023, arXiv 2309.14509).
- Of windows every process fetches the keys and values that its queries see on its neighbours. Gradients go home the way
  the keys came. Where a shard is shorter than the window, several neighbours send.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache, reduce
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from fast_attention import checks, decoding
from fast_attention.decoding import State, leaves
from fast_attention.engine.precision import rebuild
from fast_attention.engine.tracing import replaced
from fast_attention.mechanism import Attention, Shape, Unsupported
from fast_attention.parallel import collectives
from fast_attention.parallel.shards import Call, Shards, Strategy

NO_HEADS = -1  # the axis of heads of a tensor that has none
Ranges = list[tuple[int, int]]


def attend_by_states(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, from the combined state of all that its queries see on other processes."""
    states, rows = _gathered(call, k, v)
    if call.is_causal:
        before = _total(call.mechanism, states[: call.shards.rank])
        out, _ = call.mechanism.decode(q, k, v, call.w, before, key_mask=call.key_mask)
    else:
        out = call.mechanism.read(q, k, v, call.w, _total(call.mechanism, states), key_mask=call.key_mask)
    return collectives.with_gradient(out, rows)


def decode_by_states(call: Call, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
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
    rows = collectives.all_gather(torch.cat([x.reshape(-1) for x in leaves(state)]), call.shards.group)
    return [_unpacked(state, row) if n else None for row, n in zip(rows, call.shards.keys, strict=True)], rows


def _total(mechanism: Any, states: list[State | None]) -> Any:
    """The combined state; None where there is none."""
    there = [state for state in states if state is not None]
    return reduce(mechanism.combine, there) if there else None


def _unpacked(state: Any, row: Tensor) -> Any:
    """A state like another, with the numbers of a row."""
    parts = iter(row.split([x.numel() for x in leaves(state)]))
    return tree_map_only(Tensor, lambda x: next(parts).view_as(x).to(x.dtype), state)


STATES = Strategy("states", "one all-gather of states", attend_by_states, decode_by_states)


def attend_by_heads(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, between two transpositions."""
    part, inputs = _transposed(call, q, k, v)
    out = part.mechanism(*inputs, part.w, is_causal=call.is_causal, key_mask=part.key_mask)
    return _to_sequence(out, call.shards.queries, call.shards)


def _transposed(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, list[Tensor]]:
    """The call of this process's heads with a mask of all tokens, and their queries, keys and values of all tokens."""
    shards, heads, key_mask = call.shards, q.shape[-3], call.key_mask
    if heads % shards.world:
        raise Unsupported(
            f"{call.mechanism!r} with {heads} heads on {shards.world} processes: each takes heads / processes of "
            f"them. What would work: a number of processes that divides {heads}, or LinearAttention()"
        )
    share = heads // shards.world
    mechanism = _of_heads(call.mechanism, shards.rank * share, share, heads)
    w = _own_heads(call.w, _weight_axes(call.mechanism, heads, share), shards) if call.w else call.w
    sizes = (shards.queries, shards.keys, shards.keys)
    inputs = [_to_heads(x, lengths, shards) for x, lengths in zip((q, k, v), sizes, strict=True)]
    if key_mask is not None:
        rows = key_mask.expand(*k.shape[:-3], key_mask.shape[-1])[..., None, :, None]
        rows = rows.expand(*k.shape[:-3], shards.world, -1, 1).to(torch.uint8)
        key_mask = _to_heads(rows, shards.keys, shards)[..., 0, :, 0].bool()
    return call._replace(mechanism=mechanism, w=w, key_mask=key_mask), inputs


def _to_heads(x: Tensor, lengths: tuple[int, ...], shards: Shards) -> Tensor:
    """This process's heads (..., H / W, L, E) of all tokens, from all heads of its tokens."""
    return collectives.all_to_all(x.unflatten(-3, (shards.world, -1)).unbind(-4), lengths, shards.group)


def _to_sequence(x: Tensor, lengths: tuple[int, ...], shards: Shards) -> Tensor:
    """All heads of this process's tokens, from its heads (..., H / W, L, E) of all tokens."""
    world, own = shards.world, lengths[shards.rank]
    out = collectives.all_to_all(x.split(list(lengths), -2), [own] * world, shards.group)
    return out.unflatten(-2, (world, own)).movedim(-3, -4).flatten(-4, -3)


@runtime_checkable
class ByHead(Protocol):
    """A mechanism, or a setting of one such as a bias, that treats heads differently."""

    def of_heads(self, first: int, number: int, heads: int) -> Any:
        """The value that does with ``number`` heads what this one does with those from ``first`` on, of ``heads``."""


def _of_heads(value: Any, first: int, share: int, heads: int) -> Any:
    """``ByHead.of_heads`` of a value and of the mechanisms and biases in its fields."""
    parts = {each.name: getattr(value, each.name) for each in fields(value)}
    inner = {
        name: _of_heads(part, first, share, heads)
        for name, part in parts.items()
        if isinstance(part, Attention | ByHead)
    }
    value = replace(value, **inner) if inner else value
    return value.of_heads(first, share, heads) if isinstance(value, ByHead) else value


@lru_cache(maxsize=256)
def _weight_axes(mechanism: Attention[Any, Any], heads: int, share: int) -> Any:
    """For every tensor of the weights the axis of heads: seen by making weights that hold nothing."""
    with torch.device("meta"):
        return _axes(*(mechanism.weights(Shape(n, 8, 64)) for n in (heads, share)))


def _axes(whole: Any, part: Any) -> Any:
    """For every tensor of a tree the axis on which it differs from one of fewer heads; None in place of no tensor."""
    if isinstance(whole, Tensor):
        sizes = zip(whole.shape, part.shape, strict=True)
        return next((i for i, (m, n) in enumerate(sizes) if m != n), NO_HEADS)
    return tuple(map(_axes, whole, part)) if isinstance(whole, tuple) else None


def _own_heads(tree: Any, axes: Any, shards: Shards) -> Any:
    """This process's heads of weights or of a state."""
    if isinstance(tree, Tensor):
        if axes == NO_HEADS:
            return tree
        share = tree.shape[axes] // shards.world
        return tree.narrow(axes, shards.rank * share, share)
    if not isinstance(tree, tuple) or not tree:
        return tree
    return rebuild(tree, [_own_heads(*each, shards) for each in zip(tree, axes, strict=True)])


def decode_by_heads(call: Call, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
    """This process's outputs after ``state``, and the state after the tokens of all processes, with all heads."""
    mechanism, shards = call.mechanism, call.shards
    part, inputs = _transposed(call, q, k, v)
    axes = _state_axes(mechanism, (call.w, q, k, v), (part.w, *inputs))
    before = None
    if state is not None:
        _refuse_other_form(mechanism, state.content, axes)
        empty = decoding.empty(part.mechanism, inputs[0], inputs[1], inputs[2], part.w)
        before = replaced(empty, content=_own_heads(state.content, axes, shards))
    out, after = part.mechanism.decode(*inputs, part.w, before, key_mask=part.key_mask)
    _refuse_other_form(mechanism, after.content, axes)
    content = _joined(after.content, axes, shards.group)
    return _to_sequence(out, shards.queries, shards), replaced(
        decoding.empty(mechanism, q, k, v, call.w), content=content
    )


def _state_axes(mechanism: Any, *calls: tuple[Any, ...]) -> Any:
    """For every tensor of a state the axis of heads: seen in states of one token, of all heads and of some."""
    with torch.no_grad():
        states = [
            mechanism.decode(*(x.new_zeros(*x.shape[:-2], 1, x.shape[-1]) for x in inputs), w)[1].content
            for w, *inputs in calls
        ]
    return _axes(*states)


def _refuse_other_form(mechanism: Any, content: Any, axes: Any) -> None:
    """Raise ``Unsupported`` on all processes where a state has other parts than that of one token."""
    if isinstance(content, tuple) and isinstance(axes, tuple) and not isinstance(content, decoding.Rows):
        for each in zip(content, axes, strict=True):
            _refuse_other_form(mechanism, *each)
    elif content is not None and (isinstance(content, tuple) or isinstance(content, Tensor) != isinstance(axes, int)):
        raise Unsupported(
            f"{mechanism!r} changes the form of its state after some tokens, and processes cannot join its heads. "
            "What would work: decode in one process, or a mechanism whose state keeps its form, such as Softmax()"
        )


def _joined(content: Any, axes: Any, group: Any) -> Any:
    """A state with the heads of all processes."""
    if isinstance(content, Tensor):
        if axes == NO_HEADS:
            return content
        everyone = collectives.all_gather(content.to(torch.uint8) if content.dtype == torch.bool else content, group)
        return torch.cat(list(everyone), axes).to(content.dtype)
    if not isinstance(content, tuple):
        return content
    return rebuild(content, [_joined(*each, group) for each in zip(content, axes, strict=True)])


HEADS = Strategy("heads", "four all-to-alls, of queries, keys, values and outputs", attend_by_heads, decode_by_heads)


@runtime_checkable
class Windowed(Protocol):
    """An attention whose queries see only keys at a bounded distance, and which gives the same over these keys alone.

    Its queries are then aligned to the bottom right of the keys, as in every causal call with fewer queries than keys.
    """

    def key_range(self, first: int, end: int) -> tuple[int, int]:
        """The positions of the first key that queries ``first`` to ``end - 1`` see, and of the one behind the last.

        Positions may lie outside of the sequence, and with is_causal=True no key behind a query is seen.
        """
        ...


def ranges(call: Call) -> Ranges:
    """The keys that queries of each process see, by positions in the whole sequence."""
    shards, mechanism = call.shards, call.mechanism
    assert isinstance(mechanism, Windowed)
    shift, visible = shards.num_keys - shards.length, []  # the last query stands at the last key
    for first, end in shards.borders(keys=False):
        first, end = first + shift, end + shift
        low, high = mechanism.key_range(first, end) if end > first else (first, first)
        low = min(max(low, 0), shards.num_keys)
        high = end if call.is_causal else high
        visible.append((low, max(min(high, shards.num_keys), low)))
    return visible


def attend_by_windows(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This process's outputs, over its keys and its neighbours'."""
    mechanism, shards, visible = call.mechanism, call.shards, ranges(call)
    columns = [k, v]
    if call.key_mask is not None:
        columns.append(call.key_mask[..., None, :].expand(*k.shape[:-1]).to(k.dtype)[..., None])
    fetched = fetch(torch.cat(columns, -1), visible, shards)
    near_k, near_v, *mask = fetched.split([x.shape[-1] for x in columns], -1)
    key_mask = mask[0][..., 0, :, 0].detach() > 0.5 if mask else None
    end = shards.start + q.shape[-2] + shards.num_keys - shards.length
    extra = max(visible[shards.rank][1] - end, 0)  # keys behind the last query, at which rows of zeros stand
    queries, w = F.pad(q, (0, 0, 0, extra)), checks.weights(mechanism, call.w, q)
    out = mechanism(queries, near_k, near_v, w, is_causal=call.is_causal, key_mask=key_mask)
    return collectives.with_gradient(out[..., : q.shape[-2], :], fetched)


def fetch(x: Tensor, visible: Ranges, shards: Shards) -> Tensor:
    """The keys' tokens ``visible[rank]`` of the whole sequence, from this process's (..., S, E).

    One all-to-all, in which every process sends what others want of its tokens; gradients go home the same way.
    """
    borders = shards.borders()
    first = borders[shards.rank][0]
    outgoing = [x[..., a - first : b - first, :] for a, b in (_common(borders[shards.rank], each) for each in visible)]
    incoming = [b - a for a, b in (_common(each, visible[shards.rank]) for each in borders)]
    return collectives.all_to_all(outgoing, incoming, shards.group)


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


WINDOWS = Strategy(
    "windows", "one all-to-all of the keys and values near the borders of shards", attend_by_windows, decode_by_heads
)
