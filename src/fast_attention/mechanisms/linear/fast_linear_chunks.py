"""Linear attention's chunks in memory that is used again and again: features, divisions and their gradients, in place.

A chunk of some heads is several tiles of one size side by side, (tiles, size, E), so that few calls do much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine.numerics import nan_if_infinite
from fast_attention.engine.recurrence import Chunk, groups
from fast_attention.engine.workspace import Workspace
from fast_attention.feature_maps.feature_map import FeatureMap, InPlace
from fast_attention.feature_maps.features import EluPlusOne, Relu, SoftmaxMap

NUMBERS = 2**18  # in one tensor of a chunk: a megabyte in float32, half of it a core's
NEVER_NEGATIVE = (EluPlusOne, Relu, SoftmaxMap)


def chunks(rows: int, length: int, size: int, numbers: int, factor: int = 1) -> list[list[Chunk]]:
    """Groups of chunks of as many tiles as ``factor`` times ``NUMBERS`` holds, where a tile takes ``numbers``."""
    size = min(size, length)
    tiles = max(1, factor * NUMBERS // numbers)
    return groups(rows, length, tiles * size, together=max(1, tiles // -(-length // size)), tile=size)


def tokens(x: Tensor, chunk: Chunk, workspace: Workspace, name: str, masked: Tensor | None = None) -> Tensor:
    """The chunk's tiles (tiles, size, E), zeros where masked or padding: a view where that is possible, else a copy."""
    block = chunk.of(x)
    if chunk.full and masked is None and block.is_contiguous():
        return block.view(-1, chunk.size, x.shape[-1])
    tiles, filled = _memory(block, chunk, workspace, name, x.shape[-1])
    filled.copy_(block)
    if masked is not None:
        filled.masked_fill_(chunk.of(masked), 0.0)
    return tiles


def features(
    phi: InPlace, x: Tensor, chunk: Chunk, workspace: Workspace, name: str, masked: Tensor | None = None
) -> Tensor:
    """``phi`` of the chunk's tokens, (tiles, size, C), zeros for masked keys and padding."""
    block = chunk.of(x)
    tiles, filled = _memory(block, chunk, workspace, name, phi.width(x.shape[-1]))
    phi.at(chunk.span.start).fill(block, filled, workspace("scratch", *block.shape))
    if masked is not None:
        filled.masked_fill_(chunk.of(masked), 0.0)
    return tiles


def _memory(block: Tensor, chunk: Chunk, workspace: Workspace, name: str, width: int) -> tuple[Tensor, Tensor]:
    """Tiles, zeros in the padding, and the part of them that is to be filled."""
    count, length = block.shape[0], block.shape[1]
    padded = workspace(name, count, chunk.size * chunk.tiles, width)
    filled = padded
    if not chunk.full:
        filled = padded[:, :length]
        padded[:, length:].zero_()
    return padded.view(-1, chunk.size, width), filled


def inside(x: Tensor, chunk: Chunk) -> Tensor:
    """Tiles (tiles, size, E) as the chunk's tokens (rows, tokens, E), without padding."""
    x = x.view(-1, chunk.size * chunk.tiles, x.shape[-1])
    return x if chunk.full else x[:, : chunk.span.stop - chunk.span.start]


def features_vjp(
    phi: InPlace, x: Tensor, values: Tensor, gradient: Tensor, chunk: Chunk, out: Tensor,
    masked: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient of the chunk's ``x`` from that of ``values = phi(x)``, which are lost."""
    dx = chunk.of(out)
    phi.at(chunk.span.start).vjp(chunk.of(x), values, gradient, dx)
    if masked is not None:
        dx.masked_fill_(chunk.of(masked), 0.0)


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


def quotient_vjp(
    out: Tensor, denominators: Tensor, grad_out: Tensor, chunk: Chunk, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Gradients of the chunk's numerators (tiles, size, Ev) and denominators (tiles, size, 1), zeros in padding."""
    block = chunk.of(grad_out)
    d_numerator, filled = _memory(block, chunk, workspace, "d_numerator", block.shape[-1])
    d_denominator, filled_row = _memory(block, chunk, workspace, "d_denominator", 1)
    torch.div(block, chunk.of(denominators), out=filled)
    terms = torch.mul(filled, chunk.of(out), out=workspace("scratch of values", *block.shape))
    filled_row.copy_(terms.sum(-1, keepdim=True)).neg_()
    return d_numerator, d_denominator
