"""Scans with a hand-written gradient of one chunk: the loops, the carry and what is kept, by a sum that decays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fast_attention.engine.recurrence import Chunk, ChunkPass, groups

DECAY = 0.8


@dataclass(frozen=True)
class Forward(ChunkPass[Tensor]):
    """``y_t = DECAY y_{t-1} + x_t^2``; what a chunk keeps is the sum before it."""

    x: Tensor
    y: Tensor
    first: Tensor
    last: Tensor

    def begin(self, rows: slice) -> Tensor:
        return self.first[rows].clone()

    def chunk(self, chunk: Chunk, carry: Tensor, kept: Sequence[Tensor]) -> None:
        kept[0].copy_(carry)
        for x, y in zip(chunk.of(self.x).unbind(1), chunk.of(self.y).unbind(1), strict=True):
            y.copy_(carry.mul_(DECAY).add_(x.square()))

    def end(self, rows: slice, carry: Tensor) -> None:
        self.last[rows] = carry


@dataclass(frozen=True)
class Backward(ChunkPass[Tensor]):
    """The gradients of x and of the sum before the first token."""

    x: Tensor
    dy: Tensor
    dx: Tensor
    d_first: Tensor
    d_last: Tensor
    seen: list[Tensor]

    def begin(self, rows: slice) -> Tensor:
        return self.d_last[rows].clone()

    def chunk(self, chunk: Chunk, carry: Tensor, kept: Sequence[Tensor]) -> None:
        self.seen.append(kept[0].clone())
        tensors = (chunk.of(t).unbind(1)[::-1] for t in (self.x, self.dy, self.dx))
        for x, dy, dx in zip(*tensors, strict=True):
            dx.copy_(carry.add_(dy) * 2 * x)
            carry.mul_(DECAY)

    def end(self, rows: slice, carry: Tensor) -> None:
        self.d_first[rows] = carry


@pytest.mark.parametrize("lead", [0, 4])
@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_chunks_are_the_loop(size: int, lead: int) -> None:
    x, first = torch.randn(5, 13, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    order = groups(5, 13, size, together=2, lead=lead)
    y, last, dx, d_first = torch.empty_like(x), torch.empty_like(first), torch.empty_like(x), torch.empty_like(first)
    kept = [x.new_empty(5, len(order[0]), 2)]
    Forward(x, y, first, last).run(order, kept)
    leaves, rows = (x.clone().requires_grad_(), first.clone().requires_grad_()), []
    state = leaves[1]
    for token in leaves[0].unbind(1):
        state = DECAY * state + token.square()
        rows.append(state)
    expected = torch.stack(rows, 1)
    torch.testing.assert_close((y, last), (expected, rows[-1]))
    starts = [chunk.span.start for chunk in order[0]]
    torch.testing.assert_close(kept[0], torch.stack([first if at == 0 else rows[at - 1] for at in starts], 1))
    dy, d_last, seen = torch.randn_like(x), torch.randn_like(first), []
    Backward(x, dy, dx, d_first, d_last, seen).run(order, kept, backward=True)
    wanted = torch.autograd.grad((expected, rows[-1]), leaves, (dy, d_last))
    torch.testing.assert_close((dx, d_first), wanted)
    torch.testing.assert_close(seen[0], kept[0][-1:, -1])


def test_nothing_need_be_kept() -> None:
    """One place of memory then serves all chunks."""
    x = torch.randn(3, 7, 2)
    y, zeros = torch.empty_like(x), x.new_zeros(3, 2)
    Forward(x, y, zeros, zeros.clone()).run(groups(3, 7, 2, together=3), [x.new_empty(3, 1, 2)])
    torch.testing.assert_close(y[:, 1], DECAY * x[:, 0].square() + x[:, 1].square())
