"""Fetches tokens that other processes hold, by ranges: windows reach over borders of shards, over several of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fast_attention.parallel import collectives
from fast_attention.parallel.shards import Shards

Ranges = list[tuple[int, int]]


def fetch(x: Tensor, wanted: Ranges, shards: Shards) -> Tensor:
    """The keys' tokens ``wanted[rank]`` of the whole sequence, from this process's (..., S, E).

    One all-to-all, in which every process sends what others want of its tokens; gradients go home the same way.

    Args:
        x: This process's tokens.
        wanted: First position and the one behind the last, for each process, inside the sequence.
        shards: Who holds what.
    """
    borders = list(pairwise(shards.starts()))
    borders_here, first = borders[shards.rank], borders[shards.rank][0]
    outgoing = [x[..., a - first : b - first, :] for a, b in (_common(borders_here, each) for each in wanted)]
    incoming = [b - a for a, b in (_common(each, wanted[shards.rank]) for each in borders)]
    token = x.shape[:-2].numel() * x.shape[-1]
    flat = collectives.all_to_all(
        torch.cat([part.reshape(-1) for part in outgoing]),
        [part.numel() for part in outgoing],
        [n * token for n in incoming],
        shards.group,
    )
    parts = flat.split([n * token for n in incoming])
    return torch.cat([p.view(*x.shape[:-2], n, x.shape[-1]) for p, n in zip(parts, incoming, strict=True)], -2)


def fetch_rows(x: Tensor, outgoing: list[Tensor], incoming: list[int], group: Any) -> Tensor:
    """Rows of every process's (rows, E), in the order of ranks: one all-to-all, gradients go home the same way.

    Args:
        x: This process's rows.
        outgoing: For each process the numbers of the rows that it gets.
        incoming: How many rows each process sends to this one.
        group: The ``ProcessGroup``.
    """
    width = x.shape[-1]
    flat = collectives.all_to_all(
        x.index_select(0, torch.cat(outgoing)).reshape(-1),
        [len(rows) * width for rows in outgoing],
        [n * width for n in incoming],
        group,
    )
    return flat.view(sum(incoming), width)


def tokens_sent(wanted: Ranges, shards: Shards) -> int:
    """How many of its tokens this process sends to others, one counted as often as it is sent."""
    borders_here = list(pairwise(shards.starts()))[shards.rank]
    overlaps = (_common(borders_here, each) for rank, each in enumerate(wanted) if rank != shards.rank)
    return sum(b - a for a, b in overlaps)


def beyond(shards: Shards, sender: int, receiver: int, near: Ranges, *, is_causal: bool) -> Ranges:
    """The keys of one process that stand outside of another's range, if causal before it; in the whole sequence."""
    first, end = shards.starts()[sender : sender + 2]
    low, high = near[receiver]
    both = [(first, min(end, low)), (end if is_causal else max(first, high), end)]
    return [(a, b) for a, b in both if b > a]


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))
