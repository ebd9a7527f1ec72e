"""Packed sequences among chunks: each begins a chunk of its own, and sums are dropped where one does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """Where packed tokens stand once every sequence fills whole chunks, the last of them with tokens that none sees."""

    at: Tensor  # (tokens,)
    length: int
    begins: Tensor  # (chunks,), whether a sequence begins there

    @classmethod
    def of(cls, lengths: tuple[int, ...], chunk: int, device: torch.device) -> Chunks:
        """Of sequences of so many tokens."""
        counts = [-(-length // chunk) for length in lengths]
        starts, total = [*accumulate(counts, initial=0)], sum(counts)
        first = torch.zeros(total, dtype=torch.uint8)
        first[[start for start, count in zip(starts, counts, strict=False) if count]] = 1
        shift = torch.tensor(starts[:-1]) * chunk - torch.tensor([*accumulate(lengths, initial=0)][:-1])
        at = torch.arange(sum(lengths)) + shift.repeat_interleave(torch.tensor(lengths))
        return cls(at.to(device), total * chunk, first.to(device))

    def spread(self, x: Tensor) -> Tensor:
        """Packed tokens (..., n, width) where they stand among chunks."""
        return x.new_zeros((*x.shape[:-2], self.length, x.shape[-1])).index_copy(-2, self.at, x)

    def visible(self, key_mask: Tensor | None) -> Tensor:
        """Which tokens among chunks may be seen, (..., length)."""
        shown = torch.ones_like(self.at, dtype=torch.bool) if key_mask is None else key_mask
        return shown.new_zeros((*shown.shape[:-1], self.length)).index_copy(-1, self.at, shown)

    def gathered(self, x: Tensor) -> Tensor:
        """Tokens among chunks as they were packed."""
        return x.index_select(-2, self.at)


def one_by_one(
    scan: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None,
    first: Tensor | None, begins: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What a scan ``(q, k, v, key_mask, first)`` of one sequence gives for several, chunks of which begin them."""
    size, outs, last = q.shape[-2] // len(begins), [], q
    starts = [0, *(i * size for i, begin in enumerate(begins.tolist()) if begin and i), q.shape[-2]]
    for start, stop in pairwise(starts):
        rows = slice(start, stop)
        tokens, mask = (x[..., rows, :] for x in (q, k, v)), None if key_mask is None else key_mask[..., rows]
        out, last = scan(*tokens, mask, first)
        outs.append(out)
        first = None
    return torch.cat(outs, -2), last
