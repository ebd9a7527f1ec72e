"""Means of neighbouring tokens: what Nystromformer calls landmarks, and what agent attention pools its agents to."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.tracing import symbolic


def segment_means(
    *tokens: Float[Tensor, "*batch length width"], number: int, key_mask: Bool[Tensor, "*#batch2 length"] | None
) -> tuple[list[Float[Tensor, "*batch number width"]], Int[Tensor, "*#batch2 number"] | None]:
    """Means of queries, keys or values over ``number`` segments of the visible tokens, and how many each holds.

    The r-th of n visible tokens is in segment ``floor(r number / n)``: neighbours in segments whose sizes differ by at
    most one, as if masked tokens were not there. Where n < number, a segment holds one token, or none and zeros.
    The count is None where all hold as many.
    """
    length, device = tokens[0].shape[-2], tokens[0].device
    if key_mask is None and not symbolic() and length % number == 0:
        return [x.unflatten(-2, (number, -1)).mean(-2) for x in tokens], None
    rank, total = torch.arange(length, device=device), length
    if key_mask is not None:
        rank, total = key_mask.cumsum(-1) - 1, key_mask.sum(-1, keepdim=True).clamp_min(1)
    member = (rank * number // total)[..., None, :] == torch.arange(number, device=device)[:, None]
    if key_mask is not None:
        member = member & key_mask[..., None, :]
    count = member.sum(-1)
    share = member.to(tokens[0].dtype) / count.clamp_min(1)[..., None]
    return [share @ masks.drop(x, key_mask) for x in tokens], count
