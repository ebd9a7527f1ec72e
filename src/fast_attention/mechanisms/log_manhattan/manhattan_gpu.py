"""Manhattan attention of signed differences by the kernels of log attention: ``sum_j (l_j - l_i) v_j``.

The l of log keys, less that of the first visible key, are a key's score and, negative, a query's. To the first key
differences have no query's score. ``mean``: over the number of visible keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine.chunks import visible_counts
from fast_attention.gpu.summing.plain import COUNT, NOTHING
from fast_attention.mechanisms.log_manhattan import gpu, reference
from fast_attention.mechanisms.log_manhattan.reference import Differences


def divisor(*, mean: bool) -> int:
    """By what sums of differences are divided."""
    return COUNT if mean else NOTHING


def attend(
    l: Tensor, diagonal: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool, mean: bool, to_first: bool
) -> Tensor:
    """The first term and the sum of differences, in float32; ``diagonal`` is ``h v`` of every token."""
    anchor, first = reference.anchored(l, diagonal, key_mask)
    a, b, _ = _scores(l, anchor, to_first=to_first)
    total = gpu.attend(a, b, v, key_mask, is_causal=is_causal, divisor=divisor(mean=mean), dtype=torch.float32)
    return total + (_from_first(first, v, key_mask, None, is_causal=is_causal) if to_first else diagonal)


def advance(
    l: Tensor, diagonal: Tensor, v: Tensor, key_mask: Tensor | None, state: Differences | None, *, mean: bool,
    to_first: bool,
) -> tuple[Tensor, Differences]:  # fmt: skip
    """The same of new tokens, causal, and the sums after them."""
    anchor, first = reference.anchored(l, diagonal, key_mask, state)
    a, b, anchor = _scores(l, anchor, to_first=to_first)
    settings = {"divisor": divisor(mean=mean), "dtype": torch.float32}
    total, last = gpu.advance(a, b, v, key_mask, None if state is None else _row(state), **settings)
    plain, weighted, _, count = last[..., None, :].chunk(4, -1)
    out = total + (_from_first(first, v, key_mask, state, is_causal=True) if to_first else diagonal)
    return out, Differences(anchor, first, count[..., :1], plain, weighted)


def _scores(l: Tensor, anchor: Tensor, *, to_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of queries and keys, and the anchor: a constant where it cancels, whose gradient would be rounding."""
    anchor = anchor if to_first else anchor.detach()
    b = l - anchor
    return torch.zeros_like(b[..., :1]) if to_first else -b, b, anchor


def _from_first(
    first: Tensor, v: Tensor, key_mask: Tensor | None, state: Differences | None, *, is_causal: bool
) -> Tensor:
    """The first key's term for every token that sees it."""
    count = visible_counts(key_mask, v, is_causal=is_causal)
    return torch.where((count if state is None else count + state.number) == 0, 0.0, first)


def _row(state: Differences) -> Tensor:
    """A state as kernels have it; of scores alone there is no sum."""
    plain, weighted = (x[..., 0, :] for x in (state.plain, state.weighted))
    return torch.cat([plain, weighted, torch.zeros_like(plain), state.number[..., 0, :].expand_as(plain)], -1)
