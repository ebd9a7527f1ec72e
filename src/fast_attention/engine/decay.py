"""Sums along the sequence whose past fades by a decay given in logarithms: no exponent above zero is ever taken.

They work on the last axis but one, in blocks: a few steps over all blocks at once, then the same over the blocks' ends.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.blocks import join, split
from fast_attention.engine.bounds import at_most

STEPS = 16  # tokens per block of a decayed sum, walked one by one


def decayed_sums(
    x: Float[Tensor, "*batch length width"], level: Float[Tensor, "*batch length #weights"]
) -> Float[Tensor, "*batch length width"]:
    """``y_t = sum_{j <= t} exp(level_j - level_t) x_j`` for levels that never fall along the sequence.

    No exponent above zero is ever taken, whatever the levels' range: this is the recurrence
    ``y_t = exp(level_{t-1} - level_t) y_{t-1} + x_t``, walked in blocks of ``STEPS`` tokens, all blocks side by side,
    then over the blocks' ends. Time and memory O(length). Levels of width 1 serve all channels; levels of half the
    width of ``x`` serve both halves.
    """
    return _decayed(x, level, 3 if torch.compiler.is_compiling() else None)


def spread(factor: Shaped[Tensor, "*batch weights"], width: int) -> Shaped[Tensor, "*batch wide"]:
    """A factor per channel as one that fits ``width`` channels: as it is, or twice where they are two halves."""
    return factor if factor.shape[-1] in (1, width) else torch.cat([factor, factor], -1)


def _decayed(x: Tensor, level: Tensor, rounds: int | None) -> Tensor:
    """``rounds`` of blocks and then all pairs, as traced lengths need; None: as many as the length asks for."""
    length = x.shape[-2]
    if rounds is None and length <= STEPS:
        return _walked(x, level)
    if rounds == 0:
        return _all_pairs(x, level)
    level = split(level, STEPS)
    inside = (_walked if rounds is None else _all_pairs)(split(x, STEPS), level)
    ends = level[..., -1, :]
    totals = _decayed(inside[..., -1, :], ends, None if rounds is None else rounds - 1)
    before, before_level = _shifted(totals)[..., None, :], _shifted(ends)[..., None, :]
    return join(inside + spread(_fading(before_level, level), x.shape[-1]) * before, length)


def _walked(x: Tensor, level: Tensor) -> Tensor:
    decay = spread(_fading(level[..., :-1, :], level[..., 1:, :]), x.shape[-1])
    first, *rest = x.unbind(-2)
    rows = [first]
    for row, fade in zip(rest, decay.unbind(-2), strict=True):
        rows.append(torch.addcmul(row, fade, rows[-1]))
    return torch.stack(rows, -2)


def _all_pairs(x: Tensor, level: Tensor) -> Tensor:
    weights = _fading(level[..., None, :, :], level[..., :, None, :])
    later = torch.ones(weights.shape[-3:-1], dtype=torch.bool, device=x.device).triu(1)
    weights = spread(weights.masked_fill(later[..., None], 0.0), x.shape[-1])
    return (weights * x[..., None, :, :]).sum(-2)


def _fading(earlier: Tensor, later: Tensor) -> Tensor:
    # the padding behind the last token falls back to level 0: nobody reads it, but it must not overflow
    return at_most(earlier - later, 0.0).exp()


def _shifted(x: Tensor) -> Tensor:
    """Row t - 1 in place of row t, zeros in front."""
    return F.pad(x, (0, 0, 1, 0))[..., :-1, :]
