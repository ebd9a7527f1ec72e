"""Chooses the blocks that BigBird's blocks of queries see: windows, random blocks and global ones."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fast_attention.engine.operation import Operation

WORD = 0xFFFFFFFF


def _empty(
    seeds: Tensor, total: Tensor, *, number: int, first: int, last: int, half: int, draws: int, is_causal: bool
) -> Tensor:
    batch_shape = torch.broadcast_shapes(total.shape[:-2], seeds.shape[:-1])
    return seeds.new_empty(*batch_shape, number, 2 * half + 1 + first + last + draws, dtype=torch.int64)


def blocks_seen(
    seeds: Tensor, total: Tensor, *, number: int, first: int, last: int, half: int, draws: int, is_causal: bool
) -> Int[Tensor, "*#batch heads blocks choices"]:
    """Choose the blocks that each of ``number`` query blocks sees of ``total`` (..., 1, 1) blocks; -1 names none.

    ``half`` blocks on both sides and the own one, the ``first`` and the ``last`` blocks, and ``draws`` random ones.
    """
    block = torch.arange(number, device=seeds.device)
    top = block if is_causal else (total[..., 0] - last).clamp(min=first)
    low, high = (torch.minimum(x.clamp(min=first), top) for x in (block - half, block + half + 1))
    top = low if is_causal else top  # random blocks of the past only
    choices = [torch.arange(-half, half + 1, device=seeds.device) + block[:, None]]
    choices += [torch.full_like(block, i)[:, None] for i in range(first)]
    choices += [total - last + i for i in range(last)]
    if draws > 0:
        gap = high - low if not is_causal else torch.zeros_like(low)
        picks = distinct(seeds, block, top - first - gap, draws)
        picks = picks.where(picks < 0, picks + first + torch.where(picks < (low - first)[..., None], 0, gap[..., None]))
        choices.append(picks)
    batch_shape = torch.broadcast_shapes(total.shape[:-2], seeds.shape[:-1])
    table = torch.cat([x.expand(*batch_shape, number, x.shape[-1]) for x in choices], -1)
    return table.masked_fill((table < 0) | (table >= (number if is_causal else total)), -1)


pattern = Operation(blocks_seen, empty=_empty)


def mixed(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A hash of 32-bit integers held in int64: two rounds of shift, exclusive or and multiplication."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & WORD  # below 2^59: exact, and the same on every device
    return (x >> 16) ^ x


def distinct(
    seeds: Int[Tensor, "..."], index: Int[Tensor, "..."], available: Int[Tensor, "..."], number: int
) -> Int[Tensor, "... number"]:
    """``min(number, available)`` different numbers below ``available`` for each index, in slots filled up with -1.

    Floyd's sampling (Bentley and Floyd 1987), driven by a hash of the seed, the index and the draw: the same seeds give
    the same choice at any length, and every set is equally likely.
    """
    start = mixed(mixed(seeds) ^ index)
    chosen: list[Tensor] = []
    for draw in range(number):
        last = available - number + draw
        pick = mixed(start ^ draw) % (last + 1).clamp(min=1)
        for earlier in chosen:
            pick = torch.where(pick == earlier, last, pick)
        chosen.append(torch.where(last >= 0, pick, -1))
    return torch.stack(torch.broadcast_tensors(*chosen), -1)
