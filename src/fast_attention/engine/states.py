"""Prefix sums of states whose units differ, as products of matrices: one unit serves all numbers of a state.

(Where every channel has its own unit, ``decay.decayed_sums`` walks instead.)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.blocks import join, split, split_row
from fast_attention.engine.bounds import at_most
from fast_attention.engine.tracing import exporting

GROUP = 32  # states that are combined pair by pair


def state_sums(
    x: Float[Tensor, "*batch count width"], level: Float[Tensor, "*batch count"] | None
) -> Float[Tensor, "*batch count width"]:
    """``y_i = sum_{j <= i} exp(level_j - level_i) x_j`` for levels that never fall, which may be of higher
    precision than x; None stands for equal levels.

    No unit fits all sums, so that plain cumulative sums would not do: groups of ``GROUP`` are combined pair by pair,
    then the groups' totals in the same way. Time O(count GROUP width).
    """
    if level is None:
        return x.cumsum(-2)
    rounds, count = 1, x.shape[-2]  # one round is enough for millions of tokens, and asks no traced length
    if not exporting():
        rounds = 0
        while count > GROUP:
            count, rounds = -(-count // GROUP), rounds + 1
    return _combined(x, level, rounds)


def _combined(x: Tensor, level: Tensor, rounds: int) -> Tensor:
    if rounds == 0:
        later = torch.ones(level.shape[-1], level.shape[-1], dtype=torch.bool, device=x.device).triu(1)
        return _fading(level[..., None, :], level[..., :, None]).masked_fill(later, 0.0).to(x.dtype) @ x
    groups, levels = split(x, GROUP), split_row(level, GROUP)
    if exporting():  # with a further group of padding it can prove that there are several
        groups, levels = F.pad(groups, (0, 0, 0, 0, 0, 1)), F.pad(levels, (0, 0, 0, 1))
    inside, ends = _combined(groups, levels, 0), levels[..., -1]
    before = F.pad(_combined(inside[..., -1, :], ends, rounds - 1), (0, 0, 1, 0))[..., :-1, None, :]
    faded = _fading(F.pad(ends, (1, 0))[..., :-1, None], levels).to(x.dtype)[..., None] * before
    return join(inside + faded, x.shape[-2])


def _fading(earlier: Tensor, later: Tensor) -> Tensor:
    # the padding behind the last state falls back to level 0: nobody reads it, but it must not overflow
    return at_most(earlier - later, 0.0).exp()
