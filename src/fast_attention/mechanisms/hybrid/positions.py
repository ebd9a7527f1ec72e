"""Positions in the sequence: of blocks of queries, the spans of keys around them, blocks of far keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from fast_attention.engine.blocks import count, smaller
from fast_attention.engine.tracing import exporting, symbolic
from fast_attention.mechanisms.sparse.block_local import BlockLocal

CHUNK_TOKENS = 2**13  # tokens of a chunk or a quarter more, all heads together: a few MiB of features
FEW = 96  # blocks of keys up to which the sums outside all spans are one product with a matrix of weights


class Plan(NamedTuple):
    """Where blocks of queries, their spans and the blocks of far keys lie; positions count keys."""

    left: int  # keys up to so far before a query are near
    right: int  # and up to so far after it, unless causal
    is_causal: bool
    start: int  # the position of the first query
    block: int  # tokens of a block
    query_blocks: int
    behind: int  # keys of a span before its block
    ahead: int  # and after it
    first: int  # the position of the first block of keys
    before: int  # blocks of keys before the first span

    @staticmethod
    def of(length: int, block: int, before: int, after: int, is_causal: bool, start: int) -> Plan:
        """Whole blocks, counted from the first key: ``before`` and ``after`` that of a query, and its own.

        ``start`` begins a block.
        """
        behind, ahead = before * block, 0 if is_causal else after * block
        left, right, first = behind + block, block + ahead, start - behind
        before = max(0, -(-first // block))
        number = count(length, block)
        return Plan(left, right, is_causal, start, block, number, behind, ahead, first - before * block, before)

    @property
    def span(self) -> int:
        """Keys that a block of queries reads."""
        return self.behind + self.block + self.ahead

    @property
    def span_blocks(self) -> int:
        """Blocks of keys in a span; 0 where causal, since nothing after a span is visible."""
        single = not symbolic() and self.query_blocks == 1  # its last query is the last token
        return 0 if self.is_causal or single else self.span // self.block

    @property
    def key_blocks(self) -> int:
        """Blocks of keys that are summed up."""
        steps = self.query_blocks if exporting() else self.query_blocks - 1  # the last of a traced length is
        return self.before + steps + self.span_blocks  # padding: see blocks.py

    @property
    def few(self) -> bool:
        """Whether there are few blocks of keys."""
        return self.key_blocks <= FEW

    def holding(self, keys: int) -> slice:
        """The blocks of keys from the first to the last that hold some of ``keys`` tokens."""
        low = min(max(0, -self.first // self.block), self.key_blocks)
        return slice(low, max(low, min(self.key_blocks, count(keys - self.first, self.block))))

    def inside(self, keys: int) -> bool:
        """Whether all spans lie inside a sequence of ``keys`` tokens."""
        return self.start >= self.behind and self.start + self.query_blocks * self.block + self.ahead <= keys

    def query_chunks(self, q: Tensor, k: Tensor) -> Iterator[Chunk]:
        """The blocks of queries, some at a time."""
        return self._chunks(q, k, self.query_blocks, self.start, self.behind, self.ahead)

    def key_chunks(self, q: Tensor, k: Tensor) -> Iterator[Chunk]:
        """The blocks of keys that are summed up, some at a time."""
        return self._chunks(q, k, self.key_blocks, self.first, 0, 0)

    def _chunks(self, q: Tensor, k: Tensor, number: int, first: int, behind: int, ahead: int) -> Iterator[Chunk]:
        heads, length, keys, block = q[..., 0, 0].numel(), q.shape[-2], k.shape[-2], self.block
        size = max(1, CHUNK_TOKENS // (heads * block))
        chunks = -(-number // (size + size // 4))  # alike, and rather a quarter more than a small rest
        size = max(1, -(-number // max(1, chunks)))
        for n in range(0, number, size):
            end = min(n + size, number)
            begin = first + n * block
            low = min(max(begin - behind, 0), keys - 1)
            high = max(min(first + end * block + ahead, keys), low + 1)
            yield Chunk(slice(n, end), slice(n * block, min(end * block, length)), slice(low, high), begin - low)


class Chunk(NamedTuple):
    """Some blocks, their queries (if they are blocks of queries), the keys that they touch."""

    blocks: slice
    queries: slice
    keys: slice
    start: int  # the position of the first block, counted from the first of the keys

    @property
    def number(self) -> int:
        """Blocks of the chunk."""
        return self.blocks.stop - self.blocks.start

    def runs(self, tokens: int, block: int, *, start: int = 0) -> list[tuple[slice, slice]]:
        """Neighbouring whole blocks together, a block that is cut off at an end by itself; without empty ones.

        Blocks are counted from the first of the chunk, which begins at ``start`` of its ``tokens``.
        """
        low = min(max(-(start // block), 0), self.number)
        high = max(min((tokens - start) // block, self.number), low)
        parts = [*((n, n + 1) for n in range(low)), (low, high), *((n, n + 1) for n in range(high, self.number))]
        rows = [slice(max(start + a * block, 0), min(start + b * block, tokens)) for a, b in parts]
        return [(slice(*part), held) for part, held in zip(parts, rows, strict=True) if held.stop > held.start]


def in_blocks(x: Tensor, blocks: slice) -> Tensor:
    """A run of whole blocks, or a part of one, with an axis of blocks: (heads, n, E) to (heads, blocks, rows, E)."""
    return x.unflatten(1, (blocks.stop - blocks.start, -1))


def plan_of(near: BlockLocal, length: int, keys: int, start: int, *, is_causal: bool) -> Plan:
    """Where blocks lie for ``length`` queries from position ``start`` on, which begins a block."""
    end, rest = start + length if symbolic() else max(start + length, 1), keys - start
    size = near.block_size
    before, after = smaller(near.before, end // size), smaller(near.after, rest // size + 1)
    return Plan.of(length, size, before, after, is_causal, start)
