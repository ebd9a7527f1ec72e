"""Hybrid's near keys by torch's FlexAttention, with the logarithms of its normalisers; the reference adds far ones."""

from __future__ import annotations

from torch import Tensor

from fast_attention.engine.scan import FLOOR
from fast_attention.gpu import flex, patterns
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.selected import Selected


def near_part(
    near: BlockLocal | Selected, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool
) -> tuple[Tensor, Tensor] | None:
    """Outputs of queries over their near keys alone, and the logarithms (..., L, 1) of their normalisers.

    None where FlexAttention does not compute them, nor near keys that are chosen or have a bias.
    """
    if isinstance(near, Selected) or near.bias is not None:
        return None
    if patterns.unsupported_reason(q, k, v, key_mask, logged=True):
        return None
    sides = {"before": near.before, "after": near.after}
    pattern = patterns.blocks(q, k, near.block_size, **sides, is_causal=is_causal)
    out, logs = flex.attend_with_logs(q, k, v, pattern, key_mask, scale=near.scale)
    return out, logs.clamp(min=FLOOR)[..., None]
