"""How kernels of single channels cut their work: a sequence into chunks side by side, its channels among programs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fast_attention.gpu.pointers import power

CHANNELS = 64  # that a program takes
SHORTEST, LONGEST = 64, 1024  # tokens of a chunk


def _chunk(length: int) -> int:
    """About as many tokens as there are chunks, so that neither walk is long."""
    return min(max(power(math.isqrt(length)), SHORTEST), LONGEST)


class Walks:
    """What all launches over one sequence share."""

    def __init__(self, x: Tensor, begins: Tensor | None = None) -> None:
        """For tokens ``x``; ``begins`` (chunks,): which chunks are the first of a packed sequence."""
        self.batch, self.heads, self.length, self.width = x.shape
        self.begins = begins
        self.size = _chunk(self.length) if begins is None else self.length // len(begins)
        self.chunks = -(-self.length // self.size)
        self.channels = min(power(self.width), CHANNELS)
        self.walks = self.batch * self.heads * -(-self.width // self.channels)
        self.like = x

    @property
    def sizes(self) -> tuple[int, ...]:
        """What kernels are told of them."""
        return self.heads, self.length, self.width, self.size, self.chunks

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for results of this batch and these heads."""
        return self.like.new_empty((self.batch, self.heads, *sizes), dtype=dtype)
