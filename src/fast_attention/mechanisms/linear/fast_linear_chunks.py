"""Rows of a sequence in blocks that stay in cache: buffers used again and again, features made where they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from fast_attention.engine.overflow import nan_if_infinite
from fast_attention.engine.workspace import Workspace
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap
from fast_attention.feature_maps.features import EluPlusOne, Relu, SoftmaxMap

NUMBERS = 2**18  # numbers in one buffer of a block: a megabyte in float32, half of it a core's
NEVER_NEGATIVE = (EluPlusOne, Relu, SoftmaxMap)


class Chunk(NamedTuple):
    """A block: ``chunks`` chunks of ``size`` tokens of each of some rows (heads), the last chunk perhaps not full."""

    rows: slice
    span: slice
    size: int
    chunks: int
    place: int  # which block of its rows this is

    @property
    def full(self) -> bool:
        """No chunk needs padding."""
        return self.span.stop - self.span.start == self.size * self.chunks

    def of(self, x: Tensor) -> Tensor:
        """The tokens of this block, (rows, tokens, E)."""
        return x[self.rows, self.span]


def flat(x: Tensor) -> Tensor:
    """(..., L, E) -> (rows, L, E)."""
    return x.reshape(-1, *x.shape[-2:])


def masked_rows(key_mask: Tensor | None, k: Tensor) -> Bool[Tensor, "rows keys 1"] | None:
    """True where a key is masked, one flag per row and key."""
    return None if key_mask is None else (~key_mask).expand(k.shape[:-1]).reshape(-1, k.shape[-2], 1)


def chunks_of_rows(rows: int, length: int, size: int, numbers: int, factor: int = 1) -> Iterator[list[Chunk]]:
    """For some rows after the other: their blocks in order, of as many chunks as ``factor`` times ``NUMBERS`` holds.

    ``numbers`` are those that a chunk takes in the largest buffer.
    """
    size = min(size, length)
    chunks = max(1, factor * NUMBERS // numbers)
    each = -(-length // size)
    together = max(1, chunks // each)
    for first in range(0, rows, together):
        held = slice(first, min(first + together, rows))
        spans = [slice(a, min(a + chunks * size, length)) for a in range(0, length, chunks * size)]
        yield [Chunk(held, span, size, -(-(span.stop - span.start) // size), i) for i, span in enumerate(spans)]


def tokens(x: Tensor, chunk: Chunk, workspace: Workspace, name: str, masked: Tensor | None = None) -> Tensor:
    """The block's chunks (chunks, size, E): a view where that is possible, else a copy with zeros where nothing is."""
    block = chunk.of(x)
    if chunk.full and masked is None and block.is_contiguous():
        return block.view(-1, chunk.size, x.shape[-1])
    whole, part = _buffer(block, chunk, workspace, name, x.shape[-1])
    part.copy_(block)
    if masked is not None:
        part.masked_fill_(chunk.of(masked), 0.0)
    return whole


def features(
    phi: Elementwise, x: Tensor, chunk: Chunk, workspace: Workspace, name: str, masked: Tensor | None = None
) -> Tensor:  # fmt: skip
    """``phi`` of the block's tokens, (chunks, size, C), zeros for masked keys and padding."""
    block = chunk.of(x)
    whole, part = _buffer(block, chunk, workspace, name, x.shape[-1])
    phi.fill(block, part, workspace("scratch", *block.shape))
    if masked is not None:
        part.masked_fill_(chunk.of(masked), 0.0)
    return whole


def _buffer(block: Tensor, chunk: Chunk, workspace: Workspace, name: str, width: int) -> tuple[Tensor, Tensor]:
    count, length = block.shape[0], block.shape[1]
    whole = workspace(name, count, chunk.size * chunk.chunks, width)
    part = whole
    if not chunk.full:
        part = whole[:, :length]
        whole[:, length:].zero_()
    return whole.view(-1, chunk.size, width), part


def inside(x: Tensor, chunk: Chunk) -> Tensor:
    """Chunks (chunks, size, E) as the block's tokens (rows, tokens, E), without padding."""
    x = x.view(-1, chunk.size * chunk.chunks, x.shape[-1])
    return x if chunk.full else x[:, : chunk.span.stop - chunk.span.start]


def pull(
    phi: Elementwise, x: Tensor, made: Tensor, gradient: Tensor, chunk: Chunk, into: Tensor,
    masked: Tensor | None = None,
) -> None:  # fmt: skip
    """The gradient of ``x`` from that of ``made = phi(x)``, into the block's place in ``into``; ``made`` is lost."""
    place = chunk.of(into)
    phi.chain(chunk.of(x), made, gradient, place)
    if masked is not None:
        place.masked_fill_(chunk.of(masked), 0.0)


def protected(phi: FeatureMap, eps: float) -> bool:
    """Whether no denominator can be as good as zero: features are never negative, and ``eps`` is large enough."""
    return eps >= 1e-30 and isinstance(phi, NEVER_NEGATIVE)


def divide(numerator: Tensor, denominator: Tensor, eps: float, out: Tensor, *, safe: bool = False) -> None:
    """``numerator / (denominator + eps)`` into ``out``, zeros where that is as good as zero; ``safe``: it never is.

    ``denominator`` becomes what was divided by: infinity where the result is zero.
    """
    denominator.copy_(nan_if_infinite(denominator.add_(eps) if eps else denominator))
    if not safe:
        info = torch.finfo(denominator.dtype)
        denominator.masked_fill_(denominator.abs() < info.tiny / info.eps, float("inf"))
    torch.div(numerator, denominator, out=out)


def quotient_gradient(
    out: Tensor, denominators: Tensor, gradient: Tensor, chunk: Chunk, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Gradients of the block's numerators (chunks, size, Ev) and denominators (chunks, size, 1), zeros in padding."""
    block = chunk.of(gradient)
    up, up_part = _buffer(block, chunk, workspace, "up", block.shape[-1])
    down, down_part = _buffer(block, chunk, workspace, "down", 1)
    torch.div(block, chunk.of(denominators), out=up_part)
    terms = torch.mul(up_part, chunk.of(out), out=workspace("scratch of values", *block.shape))
    down_part.copy_(terms.sum(-1, keepdim=True)).neg_()
    return up, down
