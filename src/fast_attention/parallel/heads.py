"""Spreads mechanisms by heads: between two transpositions each process has some heads of all tokens.

Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Heads are independent in every attention, so that it serves all of them.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fast_attention.biases.bias import Bias
from fast_attention.engine.precision import rebuild
from fast_attention.mechanism import Attention, Shape, Unsupported
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.parallel import collectives
from fast_attention.parallel.shards import Shards
from fast_attention.parallel.strategy import Call, Sizes, Strategy


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with all tokens of this process's heads, between two transpositions."""
    part, inputs = transposed(call, q, k, v)
    out = part.mechanism(*inputs, part.w, is_causal=call.is_causal, key_mask=part.key_mask)
    return to_sequence(out, call.shards.queries, call.shards)


def transposed(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, list[Tensor]]:
    """The call of this process's heads with a mask of all tokens, and their queries, keys and values of all tokens."""
    shards = call.shards
    check(call, q.shape[-3])
    part = of_heads(call, q.shape[-3], shards)
    sizes = (shards.queries, shards.keys, shards.keys)
    inputs = [to_heads(x, lengths, shards) for x, lengths in zip((q, k, v), sizes, strict=True)]
    key_mask = call.key_mask
    if key_mask is not None:
        rows = key_mask.expand(*k.shape[:-3], key_mask.shape[-1])[..., None, :, None]
        rows = rows.expand(*k.shape[:-3], shards.world, -1, 1).to(torch.uint8)
        key_mask = to_heads(rows, shards.keys, shards)[..., 0, :, 0].bool()
    return part._replace(key_mask=key_mask), inputs


def check(call: Call, heads: int) -> None:
    """Raise ``Unsupported`` unless the processes divide the heads."""
    if heads % call.shards.world:
        raise Unsupported(
            f"{call.mechanism!r} with {heads} heads on {call.shards.world} processes: each takes heads / processes of "
            f"them. What would work: a number of processes that divides {heads}, or LinearAttention()"
        )


def to_heads(x: Tensor, lengths: tuple[int, ...], shards: Shards) -> Tensor:
    """This process's heads (..., H / W, L, E) of all tokens, from all heads of its tokens."""
    by_rank = x.unflatten(-3, (shards.world, -1)).movedim(-4, 0)
    shape, size = by_rank.shape[1:], by_rank[0].numel()
    token = shape[:-2].numel() * shape[-1]
    outgoing, incoming = [size] * shards.world, [n * token for n in lengths]
    flat = collectives.all_to_all(by_rank.reshape(-1), outgoing, incoming, shards.group)
    parts = flat.split(incoming)
    return torch.cat([part.view(*shape[:-2], n, shape[-1]) for part, n in zip(parts, lengths, strict=True)], -2)


def to_sequence(x: Tensor, lengths: tuple[int, ...], shards: Shards) -> Tensor:
    """All heads of this process's tokens, from its heads (..., H / W, L, E) of all tokens."""
    parts = [part.reshape(-1) for part in x.split(list(lengths), -2)]
    incoming = [parts[shards.rank].numel()] * shards.world
    flat = collectives.all_to_all(torch.cat(parts), [part.numel() for part in parts], incoming, shards.group)
    by_rank = flat.view(shards.world, *x.shape[:-2], lengths[shards.rank], x.shape[-1])
    return by_rank.movedim(0, -4).flatten(-4, -3)


def of_heads(call: Call, heads: int, shards: Shards) -> Call:
    """The call with the mechanism and the weights of this process's heads only."""
    share = heads // shards.world
    w = _weights(call.mechanism, call.w, heads, shards)
    return call._replace(mechanism=_of_heads(call.mechanism, shards.rank * share, share, heads), w=w)


def _of_heads(mechanism: Attention[Any, Any], first: int, share: int, heads: int) -> Attention[Any, Any]:
    """The mechanism that does with ``share`` heads what this one does with those from ``first`` on, of ``heads``."""
    if isinstance(mechanism, Local):
        mechanism = mechanism.from_head(first)
    inner: dict[str, Any] = {}
    for each in fields(mechanism):  # type: ignore[arg-type]
        part = getattr(mechanism, each.name)
        if isinstance(part, Attention):
            inner[each.name] = _of_heads(part, first, share, heads)
        elif isinstance(part, Bias):
            inner[each.name] = part.of_heads(first, share, heads)
    return replace(mechanism, **inner) if inner else mechanism  # type: ignore[type-var]


def _weights(mechanism: Attention[Any, Any], w: Any, heads: int, shards: Shards) -> Any:
    share = heads // shards.world

    def cut(tensor: Any, axes: Any) -> Any:
        if isinstance(tensor, Tensor):
            for axis in axes:
                size = tensor.shape[axis] // shards.world
                tensor = tensor.narrow(axis, shards.rank * size, size)
            return tensor
        if not isinstance(tensor, tuple):
            return tensor
        return rebuild(tensor, [cut(*pair) for pair in zip(tensor, axes, strict=True)])

    return cut(w, _head_axes(mechanism, heads, share)) if isinstance(w, tuple) and w else w


@functools.lru_cache(maxsize=256)
def _head_axes(mechanism: Attention[Any, Any], heads: int, share: int) -> Any:
    """For every tensor of the weights, the axes that grow with the heads: seen by making weights that hold nothing."""
    with torch.device("meta"):
        whole, part = (mechanism.weights(Shape(n, 8, 64)) for n in (heads, share))

    def axes(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return tuple(i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)
        return tuple(axes(*pair) for pair in zip(a, b, strict=True)) if isinstance(a, tuple) else ()

    return axes(whole, part)


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: the other processes' heads of this process's tokens, and its heads of theirs."""
    shards, share = call.shards, sizes.batch * sizes.heads // call.shards.world
    queries, keys = shards.queries[shards.rank], shards.keys[shards.rank]
    there = (shards.world - 1) * share * (queries * sizes.width + keys * (sizes.width + sizes.values)) * sizes.itemsize
    back = share * (shards.length - queries) * sizes.values * sizes.itemsize
    mask = (shards.world - 1) * sizes.batch * keys if call.masked else 0
    return there + back + mask


HEADS = Strategy("heads", "four all-to-alls, of queries, keys, values and outputs", attend, sends)
