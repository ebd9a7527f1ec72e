"""Sums a sequence with a decay given by logarithms that never fall: no exponent above zero is ever taken.

All work on the last axis but one, in blocks: inside all blocks at once, then in the same way over the blocks' ends.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.blocks import join, split, split_row
from fast_attention.engine.numerics import at_most
from fast_attention.engine.tracing import exporting, symbolic

STEPS = 16  # tokens per block of ``decayed_sums``, walked one by one
FEW = 8  # rows of ``sums_before``, walked one by one
GROUP = 32  # states per block of ``state_sums``, combined pair by pair


def decayed_sums(
    x: Float[Tensor, "*batch length width"], log_scale: Float[Tensor, "*batch length #weights"]
) -> Float[Tensor, "*batch length width"]:
    """``y_t = sum_{j <= t} exp(log_scale_j - log_scale_t) x_j`` for log scales that never fall along the sequence.

    Whatever their range, this is the recurrence ``y_t = exp(log_scale_{t-1} - log_scale_t) y_{t-1} + x_t``, walked in
    blocks of ``STEPS`` tokens, all blocks side by side, then over the blocks' ends. Time and memory O(length). Log
    scales of width 1 serve all channels; those of half the width of ``x`` serve both halves.
    """
    return _decayed(x, log_scale, 3 if symbolic() else None)


def spread(factor: Shaped[Tensor, "*batch weights"], width: int) -> Shaped[Tensor, "*batch wide"]:
    """A factor per channel as one that fits ``width`` channels: as it is, or twice where they are two halves."""
    return factor if factor.shape[-1] in (1, width) else torch.cat([factor, factor], -1)


def _decayed(x: Tensor, log_scale: Tensor, rounds: int | None) -> Tensor:
    """``rounds`` of blocks and then all pairs, as traced lengths need; None: as many as the length asks for."""
    length = x.shape[-2]
    if rounds is None and length <= STEPS:
        return _walked(x, log_scale)
    if rounds == 0:
        return _all_pairs(x, log_scale)
    log_scale = split(log_scale, STEPS)
    inside = (_walked if rounds is None else _all_pairs)(split(x, STEPS), log_scale)
    ends = log_scale[..., -1, :]
    totals = _decayed(inside[..., -1, :], ends, None if rounds is None else rounds - 1)
    before, log_scale_before = _shifted(totals)[..., None, :], _shifted(ends)[..., None, :]
    return join(inside + spread(_decay(log_scale_before, log_scale), x.shape[-1]) * before, length)


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


def state_sums(
    x: Float[Tensor, "*batch count width"], log_scale: Float[Tensor, "*batch count"] | None
) -> Float[Tensor, "*batch count width"]:
    """``y_i = sum_{j <= i} exp(log_scale_j - log_scale_i) x_j``: one log scale for all numbers of a state.

    Log scales never fall and may be of higher precision than x; None stands for equal ones. Groups of ``GROUP`` states
    are combined pair by pair, as products of matrices, then the groups' totals in the same way: none of the log scales
    would fit all sums, so that cumulative sums would not do. Time O(count GROUP width).
    """
    if log_scale is None:
        return x.cumsum(-2)
    rounds, count = 1, x.shape[-2]  # one round is enough for millions of tokens, and asks no traced length
    if not exporting():
        rounds = 0
        while count > GROUP:
            count, rounds = -(-count // GROUP), rounds + 1
    return _combined(x, log_scale, rounds)


def _combined(x: Tensor, log_scale: Tensor, rounds: int) -> Tensor:
    if rounds == 0:
        later = torch.ones(log_scale.shape[-1], log_scale.shape[-1], dtype=torch.bool, device=x.device).triu(1)
        return _decay(log_scale[..., None, :], log_scale[..., :, None]).masked_fill(later, 0.0).to(x.dtype) @ x
    groups, log_scales = split(x, GROUP), split_row(log_scale, GROUP)
    if exporting():  # with a further group of padding it can prove that there are several
        groups, log_scales = F.pad(groups, (0, 0, 0, 0, 0, 1)), F.pad(log_scales, (0, 0, 0, 1))
    inside, ends = _combined(groups, log_scales, 0), log_scales[..., -1]
    before = F.pad(_combined(inside[..., -1, :], ends, rounds - 1), (0, 0, 1, 0))[..., :-1, None, :]
    decayed = _decay(F.pad(ends, (1, 0))[..., :-1, None], log_scales).to(x.dtype)[..., None] * before
    return join(inside + decayed, x.shape[-2])


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


def _shifted(x: Tensor) -> Tensor:
    """Row t - 1 in place of row t, zeros in front."""
    return F.pad(x, (0, 0, 1, 0))[..., :-1, :]
