"""Which keys queries see, as FlexAttention reads it: windows, chosen blocks, packed sequences; whether it serves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import operation
from fast_attention.gpu import flex, self_check
from fast_attention.gpu.flex import Pattern

CAUSAL = -1  # in place of how many blocks behind its own a query sees: none of its own behind it


def against(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *added: Tensor | None, logged: bool = False, **others: Any
) -> str:  # fmt: skip
    """Why FlexAttention does not compute this call, ``logged``: with its normalisers; empty where it does.

    ``added``: what adds to scores or normalisers.
    """
    if any(x is not None for x in added):
        return "positions or sinks add to the scores"
    if why := flex.unsupported_reason(q, k, v):
        return why
    case = self_check.flex_logs() if logged else self_check.flex_attention()
    return self_check.unsupported_reason(case, q, v, masked=key_mask is not None)


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, logged: bool = False) -> str:
    """``against``, recorded where a kernel could have been hoped for."""
    if why := against(q, k, v, key_mask, logged=logged):
        operation.log_fallback(q, why)
    return why


def window(q: Tensor, k: Tensor, *, left: int, right: int) -> Pattern:
    """Queries, which end where the keys end, see so many keys before and after them."""
    at = positions(q, k)
    return flex.intervals(at - left, at + right, k.shape[-2])


def blocks(q: Tensor, k: Tensor, size: int, *, before: int, after: int, is_causal: bool) -> Pattern:
    """Queries see their own block, counted from the first key, and so many before and after it."""
    at = positions(q, k)
    number = at.div(size, rounding_mode="floor")
    return flex.intervals((number - before) * size, at if is_causal else (number + after + 1) * size - 1, k.shape[-2])


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], left: int | None, right: int | None,
    key_mask: Tensor | None, *, scale: float | None, size: int = 1,
) -> Tensor | None:  # fmt: skip
    """Softmax over what ``packed`` says of sequences that lie one behind another; None where it does not serve."""
    if unsupported_reason(q, k, v, key_mask):
        return None
    return flex.attend(q, k, v, packed(q, lengths, left, right, size=size), key_mask, scale=scale)


def packed(
    q: Tensor, lengths: tuple[int, ...], left: int | None, right: int | None, *, size: int = 1
) -> Pattern:  # fmt: skip
    """Blocks of ``size`` tokens within each of several sequences; None: without end on that side."""
    sizes = torch.tensor(lengths, device=q.device)
    end = sizes.cumsum(0)
    start, last = ((x.repeat_interleave(sizes, output_size=q.shape[-2])) for x in (end - sizes, end - 1))
    at = torch.arange(q.shape[-2], device=q.device)
    block = start + (at - start) // size * size
    lows = start if left is None else torch.maximum(start, block - left * size)
    highs = last if right is None else torch.minimum(last, at if right == CAUSAL else block + (right + 1) * size - 1)
    return flex.intervals(lows, highs, q.shape[-2])


def positions(q: Tensor, k: Tensor) -> Tensor:
    """Where queries stand among the keys."""
    return torch.arange(k.shape[-2] - q.shape[-2], k.shape[-2], device=q.device)


def chosen(q: Tensor, table: Tensor, full: Tensor | None, *, size: int, is_causal: bool) -> Pattern:
    """Blocks of queries see the blocks of keys that a table (..., blocks, choices) names; those of ``full``, all."""
    number, length = table.shape[-2], q.shape[-2]
    table = table.expand(*q.shape[:-2], *table.shape[-2:]).flatten(0, -3)
    visible = torch.zeros(len(table), number, number + 1, dtype=torch.bool, device=q.device)
    visible.scatter_(-1, torch.where(table < 0, number, table), True)
    visible = visible[..., :-1]
    if full is not None:
        full = full.expand(*q.shape[:-2], *full.shape[-2:]).flatten(0, -3)
        visible = visible | (torch.arange(number, device=q.device)[:, None] == full).any(-1, keepdim=True)
    return flex.tables(visible, size, length, is_causal=is_causal)
