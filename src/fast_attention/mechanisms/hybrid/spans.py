"""Where the hybrid's blocks of queries, the spans of keys that they read and the blocks of keys beyond these lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.blocks import count, smaller
from fast_attention.engine.tracing import exporting

BLOCK = 64  # queries that share a span of keys, and keys that are summed up together
SCORES = 2**18  # of a head in a stretch: 1 MiB in float32
FEW = 2**20  # scores, of all heads, that are taken at once
TOKENS = 2**14  # of a stretch, all heads together: a few MiB of features


class Window(NamedTuple):
    """Which keys are near: from ``left`` positions before a query to ``right`` after it; causal: none is seen after."""

    left: int
    right: int
    is_causal: bool


class Plan(NamedTuple):
    """Where blocks of queries, their spans and the blocks of keys that are summed up lie; positions count keys."""

    window: Window
    start: int  # the position of the first query
    block: int
    number: int  # blocks of queries
    ahead: int  # keys of a span behind its block
    first: int  # the position of the first block of keys
    lead: int  # blocks of keys in front of the first span

    @property
    def span(self) -> int:
        """Keys that a block of queries reads."""
        return self.window.left + self.block + self.ahead

    @property
    def behind(self) -> int:
        """Blocks of keys from the beginning of a span on that are not behind it; 0 where none behind is seen."""
        return 0 if self.window.is_causal else self.span // self.block

    @property
    def several(self) -> int:
        """Blocks of keys that are summed up."""
        between = self.number if exporting() else self.number - 1  # the last of a traced length is
        return self.lead + between + self.behind  # padding: see blocks.py

    def flat(self) -> tuple[int, ...]:
        """All numbers in a row."""
        return (*self.window, *self[1:])

    @staticmethod
    def of(left: int, right: int, is_causal: int, *others: int) -> Plan:
        """From all numbers in a row."""
        return Plan(Window(left, right, bool(is_causal)), *others)

    def many(self, q: Tensor) -> bool:
        """Whether stretches pay for the queries ``q``; no question where their number is traced."""
        return not torch.compiler.is_compiling() and q[..., 0].numel() * self.span > FEW

    def within(self, keys: int) -> bool:
        """Whether all spans lie inside a sequence."""
        return self.start >= self.window.left and self.start + self.number * self.block + self.ahead <= keys


def plan(length: int, window: Window, start: int) -> Plan:
    """For ``length`` queries, the first at position ``start``. Unless causal, spans are whole blocks."""
    block = smaller(BLOCK, length)
    number, front = count(length, block), start - window.left
    ahead = 0 if window.is_causal else window.right + -(window.left + window.right) % block
    lead = max(0, -(-front // block))
    return Plan(window, start, block, number, ahead, front - lead * block, lead)


def alone(q: Tensor, k: Tensor, window: Window) -> bool:
    """Whether this is the last query of a sequence, all of whose keys are near; no question where traced."""
    return (
        not torch.compiler.is_compiling() and window.is_causal and q.shape[-2] == 1 and k.shape[-2] <= window.left + 1
    )


class Stretch(NamedTuple):
    """Some blocks, the rows (queries or none) and the keys that they touch, and where the first stands in these."""

    blocks: slice
    rows: slice
    keys: slice
    start: int


def query_stretches(q: Tensor, k: Tensor, plan: Plan) -> Iterator[Stretch]:
    """The blocks of queries, some at a time."""
    return _stretches(q, k, plan, plan.number, plan.start, plan.window.left, plan.ahead)


def key_stretches(q: Tensor, k: Tensor, plan: Plan) -> Iterator[Stretch]:
    """The blocks of keys that are summed up, some at a time."""
    return _stretches(q, k, plan, plan.several, plan.first, 0, 0)


def _stretches(q: Tensor, k: Tensor, plan: Plan, number: int, first: int, behind: int, ahead: int) -> Iterator[Stretch]:
    heads, length, keys = q[..., 0, 0].numel(), q.shape[-2], k.shape[-2]
    size = max(1, min(SCORES // (plan.block * plan.span), TOKENS // (heads * plan.block)))
    for n in range(0, number, size):
        end = min(n + size, number)
        begin = first + n * plan.block
        low = min(max(begin - behind, 0), keys - 1)
        high = max(min(first + end * plan.block + ahead, keys), low + 1)
        queries = slice(n * plan.block, min(end * plan.block, length))
        yield Stretch(slice(n, end), queries, slice(low, high), begin - low)
