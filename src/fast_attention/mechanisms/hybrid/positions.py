"""Positions in the sequence: of sink tokens, blocks of queries, the spans of keys around them, blocks of far keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.blocks import count, smaller
from fast_attention.engine.tracing import exporting

BLOCK = 64  # queries that share a span of keys, and keys that are summed up together
CHUNK_SCORES = 2**18  # scores of one head in a chunk: 1 MiB in float32
CHUNK_TOKENS = 2**14  # tokens of a chunk, all heads together: a few MiB of features
SHORT_SCORES = 2**20  # scores of all heads up to which one chunk is fastest
MISSING = 2**62  # the position of a sink token that does not exist


class SinkTokens(NamedTuple):
    """The first and last visible keys, which every query weighs exactly, with values and positions.

    Positions (..., 1, G) count keys from the first one given; those of missing tokens are ``MISSING``.
    """

    k: Float[Tensor, "*batch sinks width"]
    v: Float[Tensor, "*batch sinks values"]
    position: Int[Tensor, "*#batch sinks"]

    @property
    def present(self) -> Bool[Tensor, "*#batch sinks"]:
        """Whether each of them exists."""
        return self.position < MISSING // 2

    @staticmethod
    def of(
        k: Tensor, v: Tensor, visible: Bool[Tensor, "*#batch keys"], *, first: int, last: int, before: int | Tensor = 0
    ) -> tuple[SinkTokens, Bool[Tensor, "*#batch keys"]]:
        """The first and last visible keys, each once, and which keys are visible beside them.

        ``before`` counts the visible keys of an earlier part of the sequence (..., 1, 1).
        """
        length, number = visible.shape[-1], first + last
        rank = visible.cumsum(-1)
        chosen = visible & ((rank + before <= first) | (rank > rank[..., -1:] - last))
        position = torch.where(chosen, torch.arange(length, device=k.device), MISSING)
        position = F.pad(position, (0, number), value=MISSING).sort(-1).values[..., :number]
        index = position.clamp(max=length - 1)
        return SinkTokens(_take(k, index), _take(v, index), position), visible & ~chosen

    def append(self, later: SinkTokens, number: int) -> SinkTokens:
        """The ``number`` earliest of these and later ones."""
        position, order = torch.cat([self.position, later.position], -1).sort(dim=-1, stable=True)
        order = order[..., :number]
        k, v = torch.cat([self.k, later.k], -2), torch.cat([self.v, later.v], -2)
        return SinkTokens(_take(k, order), _take(v, order), position[..., :number])


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Tokens at positions (..., 1, G), for all heads; ``take_along_dim`` would fix a traced length."""
    return x.gather(-2, index[..., None].expand(*x.shape[:-2], index.shape[-1], x.shape[-1]))


class Plan(NamedTuple):
    """Where blocks of queries, their spans and the blocks of far keys lie; positions count keys."""

    left: int  # keys up to so far before a query are near
    right: int  # and up to so far after it, unless causal
    is_causal: bool
    start: int  # the position of the first query
    block: int  # tokens of a block
    query_blocks: int
    ahead: int  # keys of a span after its block
    first: int  # the position of the first block of keys
    before: int  # blocks of keys before the first span

    @staticmethod
    def of(length: int, left: int, right: int, is_causal: bool, start: int) -> Plan:
        """For ``length`` queries, the first at position ``start``. Unless causal, spans are whole blocks."""
        block = smaller(BLOCK, length)
        number, span_start = count(length, block), start - left
        ahead = 0 if is_causal else right + -(left + right) % block
        before = max(0, -(-span_start // block))
        return Plan(left, right, is_causal, start, block, number, ahead, span_start - before * block, before)

    @property
    def span(self) -> int:
        """Keys that a block of queries reads."""
        return self.left + self.block + self.ahead

    @property
    def span_blocks(self) -> int:
        """Blocks of keys in a span; 0 where causal, since nothing after a span is visible."""
        return 0 if self.is_causal else self.span // self.block

    @property
    def key_blocks(self) -> int:
        """Blocks of keys that are summed up."""
        steps = self.query_blocks if exporting() else self.query_blocks - 1  # the last of a traced length is
        return self.before + steps + self.span_blocks  # padding: see blocks.py

    def is_long(self, q: Tensor) -> bool:
        """Whether chunks pay for the queries ``q``; never where lengths are traced."""
        return not torch.compiler.is_compiling() and q[..., 0].numel() * self.span > SHORT_SCORES

    def inside(self, keys: int) -> bool:
        """Whether all spans lie inside a sequence of ``keys`` tokens."""
        return self.start >= self.left and self.start + self.query_blocks * self.block + self.ahead <= keys

    def query_chunks(self, q: Tensor, k: Tensor) -> Iterator[Chunk]:
        """The blocks of queries, some at a time."""
        return self._chunks(q, k, self.query_blocks, self.start, self.left, self.ahead)

    def key_chunks(self, q: Tensor, k: Tensor) -> Iterator[Chunk]:
        """The blocks of keys that are summed up, some at a time."""
        return self._chunks(q, k, self.key_blocks, self.first, 0, 0)

    def _chunks(self, q: Tensor, k: Tensor, number: int, first: int, behind: int, ahead: int) -> Iterator[Chunk]:
        heads, length, keys, block = q[..., 0, 0].numel(), q.shape[-2], k.shape[-2], self.block
        size = max(1, min(CHUNK_SCORES // (block * self.span), CHUNK_TOKENS // (heads * block)))
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
