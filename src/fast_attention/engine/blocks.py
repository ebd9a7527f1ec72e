"""Splits sequences of any length into blocks and joins them again; overlapping slices; weights of shorter sequences.

torch.export proves of a dynamic length neither that it divides into blocks nor that there is more than one of them. So
while exporting, blocks are gathered by position, and one or two more of them, all padding, are made.
"""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.tracing import exporting, symbolic


def pad_length(x: Tensor, multiple: int, *, axis: int = -2, value: bool | int | float = 0.0) -> Tensor:
    """``x`` with ``axis`` (-1 or -2) lengthened by ``value`` to the next multiple."""
    missing = -x.shape[axis] % multiple
    if not symbolic() and missing == 0:
        return x
    return F.pad(x, (0, 0, 0, missing) if axis == -2 else (0, missing), value=value)


def count(length: int, size: int) -> int:
    """Blocks that ``split`` makes."""
    return length // size + 2 if exporting() else (length + size - 1) // size


def split(x: Tensor, size: int, *, value: bool | int | float = 0.0) -> Tensor:
    """(..., L, E) -> (..., ceil(L / size), size, E), padded by ``value`` at the end."""
    length = x.shape[-2]
    if not exporting():
        blocks = count(length, size)  # a length left open is this many times size, not divided by -1
        missing = blocks * size - length
        x = F.pad(x, (0, 0, 0, missing), value=value) if symbolic() or missing else x
        return x.unflatten(-2, (blocks, size))
    position = torch.arange(count(length, size), device=x.device)[:, None] * size + torch.arange(size, device=x.device)
    return fill(x[..., position.clamp(max=length - 1), :], (position >= length)[..., None], value)


def fill(x: Tensor, where: Tensor, value: bool | int | float) -> Tensor:
    """``masked_fill``, for booleans without the choice between two, which ONNX Runtime lacks."""
    if x.dtype != torch.bool:
        return x.masked_fill(where, value)
    return x | where if value else x & ~where


def split_row(x: Tensor, size: int, *, value: bool | int | float = 0.0) -> Tensor:
    """(..., L) -> (..., ceil(L / size), size), padded by ``value`` at the end."""
    return split(x[..., None], size, value=value)[..., 0]


def split_mask(key_mask: Tensor, size: int) -> Tensor:
    """(..., L) -> (..., ceil(L / size), size): positions past the end may not be seen."""
    return split_row(key_mask, size, value=False)


def join(blocks: Tensor, length: int) -> Tensor:
    """(..., n, size, E) -> (..., length, E): the inverse of ``split``."""
    if not exporting():
        return blocks.flatten(-3, -2)[..., :length, :]
    position, size = torch.arange(length, device=blocks.device), blocks.shape[-2]
    return blocks[..., position // size, position % size, :]


def narrow(x: Tensor, length: int, *, axis: int, start: int = 0) -> Tensor:
    """``length`` entries of a weight along ``axis``; taken by position while exporting, where there may be too few."""
    if not symbolic() and start == 0 and length == x.shape[axis]:
        return x  # the gradient of a view is a tensor as large as the weight, and a copy
    if not exporting():
        return x.narrow(axis, start, length)
    position = torch.arange(length, device=x.device) + start
    return x.index_select(axis, position.clamp(max=x.shape[axis] - 1))


def smaller(size: int, limit: int) -> int:
    """The smaller of a setting and a limit that depends on the length; the setting itself where lengths are traced."""
    return size if symbolic() else min(size, limit)


def slices(
    x: Shaped[Tensor, "*batch keys width"], *, block: int, keys_left: int, keys_right: int, number: int, start: int = 0
) -> Shaped[Tensor, "*batch number span width"]:
    """Overlapping slices of a sequence, ``span = keys_left + block + keys_right``, without a copy.

    Slice n holds the positions from ``start + n * block - keys_left`` to ``start + (n + 1) * block - 1 + keys_right``.
    Positions outside the sequence hold 0, or -1 where ``x`` holds integers.
    """
    length, span, first = x.shape[-2], keys_left + block + keys_right, start - keys_left
    outside = 0 if x.is_floating_point() or x.dtype == torch.bool else -1
    if exporting():
        position = positions(number, block, span, first, x.device)
        taken = x[..., position.clamp(min=0).clamp(max=length - 1), :]
        return fill(taken, ((position < 0) | (position >= length))[..., None], outside)
    total = (number - 1) * block + span
    if first >= length or first + total <= 0:  # wholly outside, which F.pad cannot cut out
        padded = x.new_full((*x.shape[:-2], total, x.shape[-1]), outside)
    else:
        padded = F.pad(x, (0, 0, -first, total + first - length), value=outside)
    if symbolic():  # until torch 2.14, gradients of a compiled unfold are wrong or written elsewhere
        return _neighbours(padded, block, span, number)
    return padded.unfold(-2, span, block).transpose(-1, -2)


def _neighbours(x: Tensor, block: int, span: int, number: int) -> Tensor:
    """Slices as ``unfold`` makes them, put together from neighbouring blocks."""
    blocks = F.pad(x, (0, 0, 0, -span % block)).unflatten(-2, (-1, block))
    near = [blocks.narrow(-3, keys_right, number) for keys_right in range(count(span, block))]
    return torch.cat(near, -2)[..., :span, :]


def positions(number: int, step: int, span: int, first: int, device: torch.device) -> Tensor:
    """(number, span): ``first + n * step + c``."""
    return torch.arange(number, device=device)[:, None] * step + torch.arange(span, device=device) + first
