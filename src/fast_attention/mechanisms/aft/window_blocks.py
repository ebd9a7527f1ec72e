"""Blocks of tokens with their neighbours, and the weights of a window around each query, laid out for products.

Tensors are (group, tokens, ..., width): one group holds all heads where they share the biases, position by position,
and each head is a group where they do not, with one row of biases for all positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 1 << 19  # sums worked on at a time


class Plan(NamedTuple):
    """Sizes of a call; settings of ``CustomGradient``."""

    shared: bool  # one group of all heads
    size: int  # queries per block
    reach: int  # tokens before a block that its product takes in, a multiple of ``size``
    is_causal: bool
    strict: bool
    any_masked: bool

    @property
    def keys(self) -> int:
        """Keys per block of queries."""
        return self.size + self.reach * (1 if self.is_causal else 2)


class PaddedRows:
    """Memory (group, reach + blocks * size + reach, ..., 2 D): a row for each token, and zeros around them."""

    def __init__(self, like: Tensor, plan: Plan) -> None:
        tokens = grouped(like, plan)
        length, self.reach = tokens.shape[1], plan.reach
        self.count = -(-length // plan.size)
        rows = self.count * plan.size + 2 * plan.reach
        self.all = like.new_empty(len(tokens), rows, *tokens.shape[2:-1], 2 * like.shape[-1])
        self.all[:, : plan.reach].zero_()
        self.all[:, plan.reach + length :].zero_()
        self.tokens = self.all[:, plan.reach : plan.reach + length]
        self.flat = self.all.flatten(2)
        self.blocks = self.flat.unflatten(1, (-1, plan.size))
        self.width = self.flat.shape[-1]
        self.steps = (rows * self.width, plan.size * self.width, self.width, 1)
        self.windows = self.flat.as_strided((len(tokens), self.count, plan.keys, self.width), self.steps)

    @property
    def inner(self) -> Tensor:
        """The blocks (group, blocks, size, width) of the tokens."""
        return self.blocks[:, (first := self.reach // self.blocks.shape[2]) : first + self.count]


def grouped(x: Tensor, plan: Plan) -> Tensor:
    """(..., heads, L, D) as (1, L, ..., heads, D) or (heads, L, ..., D)."""
    return x.movedim(-2, 0)[None] if plan.shared else x.movedim((-3, -2), (0, 1))


def far(sums: Tensor, reach: int, *, before: bool, after: bool) -> Tensor:
    """For every block, what ``sums`` (group, blocks, width) add up to more than ``reach`` blocks before or after."""
    total = torch.zeros_like(sums, dtype=torch.float64)
    count = max(sums.shape[1] - reach - 1, 0)
    if before:
        total[:, reach + 1 :] += sums[:, :count].mT.double().cumsum(-1).mT
    if after:
        total[:, :count] += sums[:, reach + 1 :].flip(1).mT.double().cumsum(-1).mT.flip(1)
    return total.to(sums.dtype)


class Weights:
    """The weights of a few blocks at a time: exp(w) in the window of each query and 1, or 0, around it."""

    def __init__(self, band: Tensor, plan: Plan, count: int) -> None:
        reach = band.shape[-1] // 2
        self.taps = band[..., : reach + 1] if plan.is_causal else band
        self.plan, self.per_head = plan, not plan.shared
        count = len(band) if self.per_head else count
        self.all = band.new_full((count, plan.size, plan.keys), 0.0 if plan.strict else 1.0)
        if plan.is_causal:
            self.all.tril_(plan.reach)
        self.shift = plan.reach - reach
        if self.per_head:
            self.skewed(self.all).copy_(self.taps.exp())

    def skewed(self, blocks: Tensor) -> Tensor:
        """The windows (blocks, size, taps) of ``blocks`` (blocks, size, keys), row a starting a columns later."""
        size, keys = blocks.shape[1:]
        steps = (size * keys, keys + 1, 1)
        return blocks.as_strided((len(blocks), size, self.taps.shape[-1]), steps, blocks.storage_offset() + self.shift)

    def of(self, group: int, at: slice) -> Tensor:
        """The weights of the blocks ``at``."""
        if self.per_head:
            return self.all[group].expand(at.stop - at.start, -1, -1)
        size, blocks = self.plan.size, self.all[: at.stop - at.start]
        rows = self.taps[0, at.start * size : at.stop * size]
        full, rest = divmod(len(rows), size)
        inside = self.skewed(blocks)
        torch.exp(rows[: full * size].unflatten(0, (full, size)), out=inside[:full])
        if rest:
            torch.exp(rows[full * size :], out=inside[full, :rest])
        return blocks
