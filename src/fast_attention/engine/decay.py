"""Sums a sequence with a decay given by logarithms that never fall: no exponent above zero is ever taken.

All work on the last axis but one, in blocks: inside all blocks at once, then in the same way over the blocks' ends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.blocks import join, split
from fast_attention.engine.numerics import at_most
from fast_attention.engine.scan import shifted
from fast_attention.engine.tracing import exporting, symbolic

STEPS = 16  # tokens per block of ``decayed_sums``, walked one by one
FEW = 8  # rows of ``sums_before``, walked one by one
GROUP = 32  # rows per block where all channels share a log scale, combined pair by pair


def decayed_sums(
    x: Float[Tensor, "*batch length width"], log_scale: Float[Tensor, "*batch length #weights"]
) -> Float[Tensor, "*batch length width"]:
    """``y_t = sum_{j <= t} exp(log_scale_j - log_scale_t) x_j`` for log scales that never fall along the sequence.

    Whatever their range, this is the recurrence ``y_t = exp(log_scale_{t-1} - log_scale_t) y_{t-1} + x_t``, walked in
    blocks of ``STEPS`` tokens, all blocks side by side, then over the blocks' ends. Time and memory O(length). Log
    scales of width 1 serve all channels, in blocks of ``GROUP`` that are products of matrices; those of half the width
    of ``x`` serve both halves.
    """
    if log_scale.shape[-1] == 1:
        return _decayed(x, log_scale, GROUP, _products, 1 if exporting() else None)
    return _decayed(x, log_scale, STEPS, _all_pairs if symbolic() else _walked, 3 if symbolic() else None)


def spread(factor: Shaped[Tensor, "*batch weights"], width: int) -> Shaped[Tensor, "*batch wide"]:
    """A factor per channel as one that fits ``width`` channels: as it is, or twice where they are two halves."""
    return factor if factor.shape[-1] in (1, width) else torch.cat([factor, factor], -1)


def _decayed(
    x: Tensor, log_scale: Tensor, size: int, inside: Callable[[Tensor, Tensor], Tensor], rounds: int | None
) -> Tensor:
    """``rounds`` of blocks of ``size`` and then all at once, as lengths left open need; None: as the length asks."""
    length = x.shape[-2]
    if rounds == 0 or (rounds is None and length <= size):
        return inside(x, log_scale)
    log_scale = split(log_scale, size)
    blocks, ends = inside(split(x, size), log_scale), log_scale[..., -1, :]
    totals = _decayed(blocks[..., -1, :], ends, size, inside, rounds and rounds - 1)
    before, log_scale_before = shifted(totals)[..., None, :], shifted(ends)[..., None, :]
    decay = spread(_decay(log_scale_before, log_scale), x.shape[-1]).to(x.dtype)
    return join(blocks + decay * before, length)


def _walked(x: Tensor, log_scale: Tensor) -> Tensor:
    decays = spread(_decay(log_scale[..., :-1, :], log_scale[..., 1:, :]), x.shape[-1])
    first, *rest = x.unbind(-2)
    rows = [first]
    for row, decay in zip(rest, decays.unbind(-2), strict=True):
        rows.append(torch.addcmul(row, decay, rows[-1]))
    return torch.stack(rows, -2)


def _all_pairs(x: Tensor, log_scale: Tensor) -> Tensor:
    weights = _decay(log_scale[..., None, :, :], log_scale[..., :, None, :])
    later = torch.ones(weights.shape[-3:-1], dtype=torch.bool, device=x.device).triu(1)
    weights = spread(weights.masked_fill(later[..., None], 0.0), x.shape[-1])
    return (weights * x[..., None, :, :]).sum(-2)


def _products(x: Tensor, log_scale: Tensor) -> Tensor:
    """All pairs of few rows whose channels share their log scales."""
    later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
    return _decay(log_scale.mT, log_scale).masked_fill(later, 0.0).to(x.dtype) @ x


def state_sums(
    x: Float[Tensor, "*batch count width"], log_scale: Float[Tensor, "*batch count"] | None
) -> Float[Tensor, "*batch count width"]:
    """``decayed_sums`` with one log scale for all numbers of a state, perhaps of higher precision; None: equal ones."""
    return x.cumsum(-2) if log_scale is None else decayed_sums(x, log_scale[..., None])


def sums_before(
    totals: Float[Tensor, "*batch count width"],
    decays: Float[Tensor, "*batch count width"],
    first: Float[Tensor, "*batch 1 width"],
) -> Float[Tensor, "*batch more width"]:
    """``y_0 = first``, ``y_{i+1} = decays_i y_i + totals_i``: one row more than ``totals`` has. No gradient is meant.

    Groups of ``FEW`` rows are walked row by row, side by side, then the groups in the same way.
    """
    count = totals.shape[-2]
    if count <= FEW:
        sums = [first[..., 0, :]]
        for total, decay in zip(totals.unbind(-2), decays.unbind(-2), strict=True):
            sums.append(torch.addcmul(total, decay, sums[-1]))
        return torch.stack(sums, -2)
    missing = -count % FEW
    totals = F.pad(totals, (0, 0, 0, missing)).unflatten(-2, (-1, FEW))
    decays = F.pad(decays, (0, 0, 0, missing), value=1.0).unflatten(-2, (-1, FEW))
    total, *rest = totals.unbind(-2)
    for one, decay in zip(rest, decays.unbind(-2)[1:], strict=True):
        total = torch.addcmul(one, decay, total)
    ends = sums_before(total, decays.prod(-2), first)
    inside = [ends[..., :-1, :]]
    for one, decay in zip(totals.unbind(-2)[:-1], decays.unbind(-2)[:-1], strict=True):
        inside.append(torch.addcmul(one, decay, inside[-1]))
    return torch.cat([torch.stack(inside, -2).flatten(-3, -2)[..., :count, :], ends[..., -1:, :]], -2)


def _decay(earlier: Tensor, later: Tensor) -> Tensor:
    # the padding behind the last token falls back to 0: nobody reads it, but it must not overflow
    return at_most(earlier - later, 0.0).exp()
