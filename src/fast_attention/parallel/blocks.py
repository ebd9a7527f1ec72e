"""Exchanges blocks of tokens by lists that all processes know; blocks count from the whole sequence's start."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fast_attention.parallel.fetching import fetch_rows
from fast_attention.parallel.shards import Shards


class Grid(NamedTuple):
    """Blocks of ``size`` tokens, of which the first lacks ``front``."""

    size: int
    front: int
    shards: Shards

    @property
    def number(self) -> int:
        """How many blocks the sequence has."""
        return -(-(self.shards.num_keys + self.front) // self.size)

    def blocks(self, rank: int) -> tuple[int, int]:
        """The first block that holds a token of a process, and the one behind the last."""
        first, end = self.shards.starts()[rank : rank + 2]
        first, end = first + self.front, end + self.front
        return (first // self.size, -(-end // self.size)) if end > first else (0, 0)


class Exchange(NamedTuple):
    """Which tokens go where. Rows are numbered over (N, tokens), in fetched blocks over (N, blocks, size)."""

    outgoing: list[Tensor]  # for each process the rows of this one's tokens that it gets
    incoming: list[Tensor]  # for each process where the rows that it sends are put
    number: Int[Tensor, "N blocks"]  # of each block among those fetched
    fetched: int
    grid: Grid

    def fetch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks (N, fetched, size, E) of the sequence from this process's (N, S, E); zeros where no token is.

        Also the tensor of which they are made.
        """
        rows = fetch_rows(x.flatten(0, 1), self.outgoing, [len(each) for each in self.incoming], self.grid.shards.group)
        blocks = x.new_zeros(len(x), self.fetched, self.grid.size, x.shape[-1])
        return blocks.flatten(0, 2).index_copy(0, torch.cat(self.incoming), rows).view_as(blocks), rows

    def give_back(self, blocks: Tensor) -> Tensor:
        """What every process computed for this one's tokens (W, rows, E), where all fetched the same."""
        numbers = [len(each) for each in self.outgoing]
        rows = fetch_rows(blocks.flatten(0, -2), self.incoming, numbers, self.grid.shards.group)
        return rows.view(len(numbers), numbers[0], blocks.shape[-1])


def exchange(wanted: list[Bool[Tensor, "N blocks"]], grid: Grid, *, is_causal: bool) -> Exchange:
    """The exchange by which each process gets the blocks that it wants; if causal, of its last one no later tokens."""
    shards, rows = grid.shards, wanted[grid.shards.rank]
    number = rows.cumsum(-1) - 1
    fetched = max(int(rows.sum(-1).max()), 1)
    outgoing = [
        chosen[:, 0] * shards.keys[shards.rank] + chosen[:, 1] - shards.key_start
        for chosen in (tokens(wanted, grid, shards.rank, each, is_causal=is_causal) for each in range(shards.world))
    ]
    incoming = []
    for each in range(shards.world):
        head, position = tokens(wanted, grid, each, shards.rank, is_causal=is_causal).unbind(-1)
        position = position + grid.front
        block = number[head, position // grid.size]
        incoming.append((head * fetched + block) * grid.size + position % grid.size)
    return Exchange(outgoing, incoming, number.clamp(min=0), fetched, grid)


def tokens(
    wanted: list[Bool[Tensor, "N blocks"]], grid: Grid, sender: int, receiver: int, *, is_causal: bool
) -> Int[Tensor, "rows 2"]:
    """Which of its tokens one process sends to another: their head among N, and their position in the sequence."""
    borders = list(pairwise(grid.shards.starts()))
    first, end = borders[sender]
    if is_causal:
        end = max(first, min(end, borders[receiver][1]))
    position = torch.arange(first, end, device=wanted[receiver].device)
    chosen = wanted[receiver][:, (position + grid.front) // grid.size].nonzero()
    return chosen + chosen.new_tensor([0, first])
