"""Makes and applies masks: boolean, True = may be seen; ``key_mask`` broadcasts as (..., 1, S) against (..., H, S)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

HUGE = 2.0**63  # about the root of what float32 and bfloat16 hold


def causal(length: int, keys: int, device: torch.device) -> Bool[Tensor, "length keys"]:
    """Query i sees key j when j <= i + keys - length: aligned to the bottom right, as FlashAttention does from 2.1."""
    rows = torch.arange(length, device=device)[:, None] + (keys - length)
    return torch.arange(keys, device=device)[None, :] <= rows


def band(
    block: int, keys_left: int, keys_right: int, *, left: int | None, right: int | None, device: torch.device
) -> Bool[Tensor, "block span"]:
    """Which keys of its slice a query sees: from ``left`` positions before it to ``right`` after; None: no limit."""
    rows = torch.arange(block, device=device)[:, None]
    distance = torch.arange(keys_left + block + keys_right, device=device)[None, :] - keys_left - rows
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask = mask & (distance >= -left)
    return mask if right is None else mask & (distance <= right)


def visible(length: int, keys: int, *, is_causal: bool, key_mask: Tensor | None, device: torch.device) -> Tensor | None:
    """The dense mask of both keywords, broadcastable to (..., H, L, S), or None where everything may be seen."""
    mask = causal(length, keys, device) if is_causal else None
    if key_mask is None:
        return mask
    return key_mask[..., None, :] if mask is None else mask & key_mask[..., None, :]


def drop(values: Float[Tensor, "*batch keys width"], key_mask: Tensor | None) -> Float[Tensor, "*batch keys width"]:
    """``values`` with the rows of masked keys set to zero (never multiplied: a masked row may hold anything finite)."""
    return values if key_mask is None else values.masked_fill(~key_mask[..., None], 0.0)


def drop_huge(x: Float[Tensor, "*batch keys width"], key_mask: Tensor | None) -> Float[Tensor, "*batch keys width"]:
    """``x`` with zeros for masked rows that no product can take: NaN, infinities, numbers from ``HUGE`` on.

    For tokens before a projection, whose gradient would be 0 * NaN there. Other rows stay: a masked token is still
    a query.
    """
    return x if key_mask is None else drop(x, key_mask | (x.detach().abs().amax(-1) < HUGE))


def masked_softmax(
    scores: Float[Tensor, "*batch length keys"], mask: Tensor | None, sinks: Float[Tensor, "*#batch"] | None = None
) -> Tensor:
    """Softmax over the last axis of what ``mask`` lets through; a row that sees nothing gets zeros, not NaN.

    ``sinks`` are scores of one more key in every row, whose weight is dropped.
    """
    if sinks is not None:
        column = sinks[..., None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
        mask = None if mask is None else F.pad(mask, (0, 1), value=True)
        return masked_softmax(torch.cat([scores, column], -1), mask)[..., :-1]
    if mask is None:
        return scores.softmax(-1)
    weights = scores.masked_fill(~mask, float("-inf"))
    sees_any = mask.any(-1, keepdim=True)
    return weights.masked_fill(~sees_any, 0.0).softmax(-1).masked_fill(~mask, 0.0)


def merge(attn_mask: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """One mask out of a caller's (boolean or additive) and ours (boolean): boolean where both are, else additive."""
    if mask is None:
        return attn_mask if attn_mask.dtype == torch.bool else attn_mask.to(dtype)
    if attn_mask.dtype == torch.bool:
        return attn_mask & mask
    return attn_mask.to(dtype).masked_fill(~mask, float("-inf"))
