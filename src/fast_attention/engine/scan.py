"""Computes prefix sums and running maxima along the sequence.

Both work on the last axis but one, in blocks: a few steps over all blocks at once, then the same over the blocks' ends.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import operation
from fast_attention.engine.blocks import join, split
from fast_attention.engine.operation import Fast, Operation
from fast_attention.engine.tracing import exporting, symbolic

# The logarithm of a masked key's weight: below every other, yet finite, so that differences are numbers.
FLOOR = -1e30
BLOCK = 256  # tokens per block of a cumulative sum or maximum in one operation
ROWS = 32  # tokens per block of those walked row by row
SMALL = 8192  # numbers per sequence up to which one operation is the fastest


def prefix_sums(x: Float[Tensor, "*batch length width"]) -> Float[Tensor, "*batch length width"]:
    """``y_t = sum_{j <= t} x_j``, in float32 to a few units in the last place at any length."""
    return x.cumsum(-2) if _simple(x) else _PREFIX(x)


@torch.no_grad()
def running_max(x: Float[Tensor, "*batch length width"]) -> Float[Tensor, "*batch length width"]:
    """``y_t = max_{j <= t} x_j``, at least ``FLOOR``, without a gradient: it is a log scale, which cancels."""
    if _simple(x):
        return x.cummax(-2).values
    if not operation.unsupported_reason(x):
        return accumulate_(x.clone(memory_format=torch.contiguous_format), combine=torch.maximum)
    inside = cummax(split(x, BLOCK))
    before = shifted(cummax(inside[..., -1, :]), FLOOR)
    return join(torch.maximum(inside, before[..., None, :]), x.shape[-2])


def cummax(x: Shaped[Tensor, "..."], axis: int = -2) -> Shaped[Tensor, "..."]:
    """Torch's running maximum along an axis (-1 or -2); while exporting without that operator, which ONNX lacks."""
    if not exporting():
        return x.cummax(axis).values
    return _traced_max(x) if axis == -2 else _traced_max(x[..., None])[..., 0]


def _traced_max(x: Tensor, rounds: int = 2) -> Tensor:
    """The running maximum of a length left open: in blocks of 64, then of their ends, then pair by pair."""
    length, least = x.shape[-2], torch.finfo(x.dtype).min if x.is_floating_point() else torch.iinfo(x.dtype).min
    if isinstance(length, int):  # no symbol
        return _window_max(x, length)
    if rounds == 0:
        position = torch.arange(length, device=x.device)
        return x[..., None, :, :].masked_fill((position > position[:, None])[..., None], least).amax(-2)
    blocks = _window_max(split(x, 64), 64)
    before = shifted(_traced_max(blocks[..., -1, :], rounds - 1), least)
    return join(torch.maximum(blocks, before[..., None, :]), length)


def _window_max(x: Tensor, length: int) -> Tensor:
    """The maximum over the last 4, 16, 64 ... tokens, until that is all of them."""
    position, reach = torch.arange(length, device=x.device)[:, None], 1
    while reach < length:
        x = x[..., (position - torch.arange(0, 4 * reach, reach, device=x.device)).clamp(min=0), :].amax(-2)
        reach *= 4
    return x


def accumulate_(
    x: Float[Tensor, "*batch length width"], *, backwards: bool = False, combine: Callable[..., Tensor] = torch.add
) -> Float[Tensor, "*batch length width"]:
    """Prefix sums (maxima) in place of ``x``; ``backwards``, ``y_t = sum_{j >= t} x_j``. No gradient.

    Blocks of ``ROWS`` tokens are walked row by row, all blocks side by side, then the blocks' ends in the same way.
    """
    length, step = x.shape[-2], -1 if backwards else 1
    if length < 2 * ROWS:
        _scan_in_place_(x.unbind(-2)[::step], combine)
        return x
    whole = length - length % ROWS
    divisible, rest = (x[..., -whole:, :], x[..., :-whole, :]) if backwards else (x[..., :whole, :], x[..., whole:, :])
    blocks = divisible.unflatten(-2, (-1, ROWS))
    rows = blocks.unbind(-2)[::step]
    _scan_in_place_(rows, combine)
    ends = accumulate_(rows[-1].clone(), backwards=backwards, combine=combine)
    later, carried = (
        (blocks[..., :-1, :, :], ends[..., 1:, :]) if backwards else (blocks[..., 1:, :, :], ends[..., :-1, :])
    )
    combine(later, carried[..., None, :], out=later)
    _scan_in_place_((ends[..., 0 if backwards else -1, :], *rest.unbind(-2)[::step]), combine)
    return x


def _scan_in_place_(rows: tuple[Tensor, ...], combine: Callable[..., Tensor]) -> None:
    for before, row in pairwise(rows):
        combine(row, before, out=row)


def _simple(x: Tensor) -> bool:
    """Whether one operation does: few tokens or few channels; ``cumsum`` adds in float64 on a CPU."""
    return not symbolic() and (x.shape[-2] <= ROWS or (x.shape[-2] * x.shape[-1] <= SMALL))


def _prefix_plain(x: Tensor) -> Tensor:
    inside = split(x, BLOCK).cumsum(-2)
    before = shifted(inside[..., -1, :].cumsum(-2))
    return join(inside + before[..., None, :], x.shape[-2])


def _prefix_forward(x: Tensor, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    return accumulate_(x.clone(memory_format=torch.contiguous_format)), ()


def _prefix_backward(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return (accumulate_(gradients[0].clone(memory_format=torch.contiguous_format), backwards=True),)


_PREFIX = Operation(_prefix_plain, cpu=Fast(_prefix_forward, _prefix_backward))


def shifted(x: Tensor, value: float = 0.0) -> Tensor:
    """Row t - 1 in place of row t, ``value`` in front."""
    return F.pad(x, (0, 0, 1, 0), value=value)[..., :-1, :]
