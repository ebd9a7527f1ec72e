"""What chunks of causal random features carry on: sums of very many terms, states before chunks, slices of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention.mechanisms.linear.random_feature_map import RandomFeatureMap

SUMMED = 64  # chunks added to a running sum before it moves into the total


@dataclass
class Running:
    """A sum of very many terms: few at a time, then these to the total."""

    G: Tensor
    g: Tensor

    def __post_init__(self) -> None:
        self.part, self.few, self.count = torch.zeros_like(self.G), torch.zeros_like(self.g), 0

    def fade(self, by: Tensor) -> None:
        """Change of units: factors (h, 1, C) of each feature, or (h, 1, 1)."""
        for total in (self.G, self.part):
            total.mul_(by.mT)
        for total in (self.g, self.few):
            total.mul_(by)

    def add(self, values: Tensor, v: Tensor, ones: Tensor | None = None) -> None:
        """``values^T v``, and ``values^T ones``."""
        self.part.baddbmm_(values.mT, v)
        self.few.add_(values.sum(1, keepdim=True)) if ones is None else self.few.baddbmm_(ones[:, None], values)
        self.count += 1
        if self.count == SUMMED:
            self.G.add_(self.part)
            self.g.add_(self.few)
            self.set(self.G, self.g)

    def set(self, G: Tensor, g: Tensor) -> None:
        """Begin anew from this."""
        self.G.copy_(G)
        self.g.copy_(g)
        self.part.zero_()
        self.few.zero_()
        self.count = 0

    def read(self, G: Tensor, g: Tensor) -> None:
        """The sum so far, into these."""
        torch.add(self.G, self.part, out=G)
        torch.add(self.g, self.few, out=g)


class Kept(NamedTuple):
    """For every block: the state before it (N, n, C, Ev), (N, n, 1, C), and the units (N, n, 1, C) it enters and leaves
    in, or (N, n, 1, 1)."""

    G: Tensor
    g: Tensor
    enters: Tensor
    leaves: Tensor

    def some(self, heads: slice) -> Kept:
        """Those of a few heads."""
        return Kept(*(x[heads] for x in self))

    def at(self, index: int) -> Kept:
        """Those of one block; where there is one place only, all blocks share it."""
        return Kept(*(x[:, index % x.shape[1]] for x in self))


def chunk_of(phi: RandomFeatureMap, rows: Tensor) -> int:
    """Tokens in a chunk: the more features, the more a chunk's state weighs."""
    return 64 if phi.width(rows) <= 512 else 128


def blocks(size: int, length: int, keys: int) -> list[tuple[slice, slice | None]]:
    """Slices of keys, and of the queries beside them: none beside the first ``keys - length``, which all may see."""
    extra = keys - length
    first = [(slice(a, min(a + size, extra)), None) for a in range(0, extra, size)]
    ends = [(a, min(a + size, length)) for a in range(0, length, size)]
    return [*first, *((slice(extra + a, extra + b), slice(a, b)) for a, b in ends)]
