"""Spreads attention by heads: between two transpositions each process has some heads of all tokens.

Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Heads are independent in every attention, so that it serves all of them.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fast_attention import decoding
from fast_attention.decoding import State
from fast_attention.engine.precision import rebuild
from fast_attention.engine.tracing import replaced
from fast_attention.mechanism import Attention, Shape, Unsupported
from fast_attention.parallel import collectives
from fast_attention.parallel.shards import Call, Shards, Sizes, Strategy

NO_HEADS = -1  # the axis of heads of a tensor that has none


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
    by_rank = x.unflatten(-3, (shards.world, -1)).movedim(-4, 0)
    shape, size = by_rank.shape[1:], by_rank[0].numel()
    token = shape[:-2].numel() * shape[-1]
    outgoing, incoming = [size] * shards.world, [n * token for n in lengths]
    flat = collectives.all_to_all(by_rank.reshape(-1), outgoing, incoming, shards.group)
    parts = flat.split(incoming)
    return torch.cat([part.view(*shape[:-2], n, shape[-1]) for part, n in zip(parts, lengths, strict=True)], -2)


def _to_sequence(x: Tensor, lengths: tuple[int, ...], shards: Shards) -> Tensor:
    """All heads of this process's tokens, from its heads (..., H / W, L, E) of all tokens."""
    parts = [part.reshape(-1) for part in x.split(list(lengths), -2)]
    incoming = [parts[shards.rank].numel()] * shards.world
    flat = collectives.all_to_all(torch.cat(parts), [part.numel() for part in parts], incoming, shards.group)
    by_rank = flat.view(shards.world, *x.shape[:-2], lengths[shards.rank], x.shape[-1])
    return by_rank.movedim(0, -4).flatten(-4, -3)


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


@functools.lru_cache(maxsize=256)
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


def decode(call: Call, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
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


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: the other processes' heads of this process's tokens, and its heads of theirs."""
    shards, share = call.shards, sizes.batch * sizes.heads // call.shards.world
    queries, keys = shards.queries[shards.rank], shards.keys[shards.rank]
    there = (shards.world - 1) * share * (queries * sizes.width + keys * (sizes.width + sizes.values)) * sizes.itemsize
    back = share * (shards.length - queries) * sizes.values * sizes.itemsize
    mask = (shards.world - 1) * sizes.batch * keys if call.masked else 0
    return there + back + mask


HEADS = Strategy("heads", "four all-to-alls, of queries, keys, values and outputs", attend, decode, sends)
