"""Linformer's and the Synthesizers' formulas: attention to slots that stand for many tokens, and under any scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import blocks, masks, trace
from fast_attention.engine.blocks import narrow, split, split_mask
from fast_attention.engine.fused import fused_attention
from fast_attention.engine.heads import by_head, short
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import exporting
from fast_attention.mechanisms.dense import rows

Slots = Int[Tensor, "*#batch2 rank size"]
Filled = Bool[Tensor, "*#batch2 rank size"]


def assign(
    length: int, rank: int, key_mask: Bool[Tensor, "*#batch2 length"] | None, device: torch.device
) -> tuple[Slots, Filled]:
    """The tokens of every slot, and which of its entries are filled.

    Of n tokens that may be seen, the r-th goes to slot ``floor(r rank / n)``: sizes differ by at most one, slots stay
    empty only where n < rank, and masked tokens are in none.
    """
    total = length if key_mask is None else key_mask.sum(-1, keepdim=True)
    starts = (torch.arange(rank + 1, device=device) * total + rank - 1) // rank
    position = starts[..., :-1, None] + torch.arange(blocks.count(length, rank), device=device)
    filled = position < starts[..., 1:, None]
    if key_mask is not None:  # the token of rank r is the first that leaves r + 1 visible ones behind it
        position = _visible(key_mask, position)
    return position.clamp_max(length - 1), filled


def _visible(key_mask: Tensor, rank: Tensor) -> Tensor:
    """The tokens of these ranks among the visible ones; any token for a rank beyond them."""
    if not exporting():
        return torch.searchsorted(key_mask.cumsum(-1), rank.flatten(-2) + 1).view_as(rank)
    keys = key_mask.shape[-1]  # ONNX has no search: visible tokens first, in their order
    position = torch.arange(keys, device=key_mask.device)
    order = torch.where(key_mask, position, position + keys).argsort(-1)
    return order.gather(-1, rank.flatten(-2).clamp(max=keys - 1)).view_as(rank)


def pool_mean(
    x: Float[Tensor, "*batch length width"], index: Slots, filled: Filled
) -> Float[Tensor, "*batch rank width"]:
    """The mean of every slot; an empty slot holds zeros."""
    total = _take(x, index).masked_fill(~filled[..., None], 0.0).sum(-2)
    return total / filled.sum(-1).clamp_min(1)[..., None]


def pool_max(
    x: Float[Tensor, "*batch length width"], index: Slots, filled: Filled
) -> Float[Tensor, "*batch rank width"]:
    """The maximum of every slot, channel by channel; an empty slot holds zeros."""
    largest = _take(x, index).masked_fill(~filled[..., None], float("-inf")).amax(-2)
    return largest.masked_fill(~filled.any(-1)[..., None], 0.0)


def _take(x: Tensor, index: Tensor) -> Tensor:
    flat = index.flatten(-2)[..., None]
    return x.gather(-2, flat.expand(*x.shape[:-2], flat.shape[-2], x.shape[-1])).unflatten(-2, index.shape[-2:])


@in_float32
def linformer_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    E: Float[Tensor, "*#heads rank limit"],
    F: Float[Tensor, "*#heads rank limit"] | None = None,
    *,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(Q (E K)^T / sqrt(d)) (F V)`` (arXiv 2006.04768, section 4); F is E where not given.

    Fewer tokens than ``limit`` use the first columns. Masked keys and values enter as zeros; no slot is masked,
    since every slot holds a little of every token.
    """
    E = narrow(E, k.shape[-2], axis=-1)
    F = E if F is None else narrow(F, k.shape[-2], axis=-1)
    k, v = masks.drop(k, key_mask), masks.drop(v, key_mask)
    if short(q, k, v):  # their pairs are fewer than one sequence's slots have numbers
        trace.record("scores of pairs, projected to slots", "many short sequences", slots=E.shape[-2])
        weights = by_head((q * q.shape[-1] ** -0.5) @ k.mT, E.mT).softmax(-1)
        return by_head(weights, F) @ v
    return attend_slots(q, E @ k, F @ v, None)


@in_float32
def pooled_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    rank: int,
    pool: Callable[[Tensor, Tensor, Tensor], Tensor] = pool_mean,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention with every key and value replaced by the mean (or another ``pool``) of its slot.

    The visible tokens are split into ``rank`` slots of neighbours with sizes that differ by at most one. A slot counts
    once for each of its tokens; where ``rank`` divides the length that cancels, and the paper's mean and max pooling
    remain (arXiv 2006.04768, section 4, "General projections").
    """
    index, filled = assign(k.shape[-2], rank, key_mask, q.device)
    count = filled.sum(-1).to(q.dtype)[..., None, :]
    return attend_slots(q, pool(k, index, filled), pool(v, index, filled), count)


@in_float32
def convolved_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    E: Float[Tensor, "heads stride"],
    F: Float[Tensor, "heads stride"],
    *,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Linformer with kernels ``E``, ``F`` that move over the tokens by their own length (same section).

    Masked tokens, and those missing from the last stride, enter as zeros; a slot without a visible token is masked.
    """
    stride = E.shape[-1]
    keys = (split(masks.drop(k, key_mask), stride) * E[:, None, :, None]).sum(-2)
    values = (split(masks.drop(v, key_mask), stride) * F[:, None, :, None]).sum(-2)
    if key_mask is None:
        key_mask = torch.ones(k.shape[-2], dtype=torch.bool, device=k.device)
    return attend_slots(q, keys, values, split_mask(key_mask, stride).any(-1).to(q.dtype)[..., None, :])


def attend_slots(q: Tensor, keys: Tensor, values: Tensor, count: Tensor | None) -> Tensor:
    """Softmax attention to slots, each weighed as ``count`` equal keys."""
    why = "as many slots at any length" if count is None else "a bias for each slot: how many tokens it holds"
    trace.record("torch's fused kernel on slots instead of keys", why, slots=keys.shape[-2])
    if count is None:
        return fused_attention(q, keys, values)
    # Finite even for empty slots: their values are zeros, so a query that sees nothing but them still gets zeros.
    bias = count.log().clamp_min(torch.finfo(q.dtype).min / 2)
    return fused_attention(q, keys, values, bias.expand(*q.shape[:-1], keys.shape[-2]))


@in_float32
def synthesizer_attention(
    v: Float[Tensor, "*batch keys values"],
    scores: Float[Tensor, "*#batch length keys"],
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(B + mask) V`` for any scores B (arXiv 2005.00743), one table per head or one per sequence and head.

    A query that sees nothing gets zeros.
    """
    return rows.whole(v, scores, key_mask, is_causal=is_causal, attn_mask=attn_mask, dropout=dropout)
