"""Scans whose gradient is written by hand for ONE chunk: the engine owns the order of chunks, the carry, what is kept.

Where autograd is fast enough, ``chunked.scan`` needs no gradient at all. Tensors are flat, (rows, L, E): a row is a
head of a sequence. Results are written in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from jaxtyping import Bool, Float
from torch import Tensor

Carry = TypeVar("Carry")


class Chunk(NamedTuple):
    """Consecutive tokens of some rows, perhaps in tiles of ``size`` tokens, the last of which need not be full."""

    rows: slice
    span: slice
    number: int  # among the chunks of these rows
    size: int

    @property
    def tiles(self) -> int:
        """Tiles of one row."""
        return -(-(self.span.stop - self.span.start) // self.size)

    @property
    def full(self) -> bool:
        """Whether no tile needs padding."""
        return (self.span.stop - self.span.start) % self.size == 0

    def of(self, x: Tensor) -> Tensor:
        """The tokens of this chunk, (rows, tokens, ...)."""
        return x[self.rows, self.span]


def groups(
    rows: int, length: int, tokens: int, *, together: int, tile: int | None = None, lead: int = 0
) -> list[list[Chunk]]:
    """For ``together`` rows after the others: their chunks of ``tokens`` tokens, in order; none crosses ``lead``."""
    spans = [slice(a, min(a + tokens, lead)) for a in range(0, lead, tokens)]
    spans += [slice(a, min(a + tokens, length)) for a in range(lead, length, tokens)]
    some = [slice(first, min(first + together, rows)) for first in range(0, rows, together)]
    return [[Chunk(held, span, i, tile or tokens) for i, span in enumerate(spans)] for held in some]


class ChunkPass(ABC, Generic[Carry]):
    """What one pass, forward or backward, does with a chunk; a subclass holds the tensors that it reads and writes."""

    @abstractmethod
    def begin(self, rows: slice) -> Carry:
        """The carry before the first chunk of these rows; backwards, the gradient of the state after the last."""

    @abstractmethod
    def chunk(self, chunk: Chunk, carry: Carry, kept: Sequence[Tensor]) -> None:
        """Write the chunk's results and take the chunk into the carry.

        ``kept`` is memory for what the pass backward needs of the state before this chunk: written forward, read
        backward.
        """

    @abstractmethod
    def end(self, rows: slice, carry: Carry) -> None:
        """Write what is carried out of the last chunk of these rows; backwards, the gradient of the first state."""

    def run(self, order: list[list[Chunk]], kept: Sequence[Tensor] = (), *, backward: bool = False) -> None:
        """All chunks of all groups; ``kept`` (rows, chunks, ...), or (rows, 1, ...) where nothing needs to be kept."""
        step = -1 if backward else 1
        for chunks in order[::step]:
            rows = chunks[0].rows
            carry, held = self.begin(rows), [x[rows] for x in kept]
            for chunk in chunks[::step]:
                self.chunk(chunk, carry, [x[:, chunk.number % x.shape[1]] for x in held])
            self.end(rows, carry)


def flat(x: Float[Tensor, "*batch length width"]) -> Float[Tensor, "rows length width"]:
    """Heads of all sequences in a row."""
    return x.reshape(-1, *x.shape[-2:])


def masked_rows(key_mask: Tensor | None, k: Tensor) -> Bool[Tensor, "rows keys 1"] | None:
    """True where a key is masked, one flag per row and key."""
    return None if key_mask is None else (~key_mask).expand(k.shape[:-1]).reshape(-1, k.shape[-2], 1)
