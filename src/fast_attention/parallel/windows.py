"""Spreads windows: every process fetches the keys and values that its queries see on its neighbours, and no others.

Gradients go home the way the keys came. Where a shard is shorter than the window, several neighbours send.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import checks
from fast_attention.parallel import collectives, heads
from fast_attention.parallel.shards import Call, Shards, Sizes, Strategy

Ranges = list[tuple[int, int]]


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


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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

    Args:
        x: This process's tokens.
        visible: First position and the one behind the last, for each process, inside the sequence.
        shards: Who holds what.
    """
    borders, token = shards.borders(), x.shape[:-2].numel() * x.shape[-1]
    first = borders[shards.rank][0]
    outgoing = [x[..., a - first : b - first, :] for a, b in (_common(borders[shards.rank], each) for each in visible)]
    incoming = [b - a for a, b in (_common(each, visible[shards.rank]) for each in borders)]
    sizes = [n * token for n in incoming]
    flat = torch.cat([part.reshape(-1) for part in outgoing])
    parts = collectives.all_to_all(flat, [part.numel() for part in outgoing], sizes, shards.group).split(sizes)
    return torch.cat([p.view(*x.shape[:-2], n, x.shape[-1]) for p, n in zip(parts, incoming, strict=True)], -2)


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def sends(call: Call, sizes: Sizes) -> int:
    """Bytes sent: keys and values that others' queries see, with a mask a number for each."""
    shards = call.shards
    shard = shards.borders()[shards.rank]
    common = [_common(shard, each) for rank, each in enumerate(ranges(call)) if rank != shards.rank]
    numbers = sizes.batch * sizes.heads * (sizes.width + sizes.values + call.masked)
    return sum(end - first for first, end in common) * numbers * sizes.itemsize


WINDOWS = Strategy(
    "windows", "one all-to-all of the keys and values near the borders of shards", attend, heads.decode, sends
)
