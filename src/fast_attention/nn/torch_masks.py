"""Converts the masks of ``torch.nn.MultiheadAttention``, where True means *ignore*, to ours: True = may be seen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention


class Masks(NamedTuple):
    """The masks that ``Bound.forward`` takes: True = may be seen."""

    is_causal: bool
    key_mask: Tensor | None
    attn_mask: Tensor | None


def convert(
    q: Tensor, keys: int, attn_mask: Tensor | None, padding_mask: Tensor | None, is_causal: bool, mechanism: Attention
) -> Masks:
    """Convert torch's three mask arguments for queries (N, H, L, E): the only place where their sense is inverted.

    An ``attn_mask`` that equals the causal mask becomes ``is_causal=True`` wherever the mechanism can be causal.
    Compiled code cannot read values: there the hint ``is_causal`` is believed where L = S, and an additive
    ``key_padding_mask`` is taken to hold 0 and -inf only and fails at run time if it does not.

    Raises:
        Unsupported: The key padding mask is a bias (finite, not 0) and the mechanism takes no masks.
        ValueError: A mask has another shape, or is neither boolean nor floating point.
    """
    (batch, heads, length, _), traits = q.shape, mechanism.traits
    if attn_mask is not None:
        _check("attn_mask", attn_mask, (length, keys), (batch * heads, length, keys))
        is_causal = _equals_causal(attn_mask, is_causal) and (traits.causal or not traits.mask)
        attn_mask = None if is_causal else _invert(attn_mask, batch)
    if padding_mask is None:
        return Masks(is_causal, None, attn_mask)
    _check("key_padding_mask", padding_mask, (batch, keys))
    if padding_mask.dtype == torch.bool:
        return Masks(is_causal, ~padding_mask, attn_mask)
    key_mask = padding_mask != float("-inf")
    bias = padding_mask.masked_fill(~key_mask, 0.0)[:, None, None].to(q.dtype)
    if symbolic():
        torch.ops.aten._assert_async.msg((bias == 0).all(), "compiled, key_padding_mask may hold 0 and -inf only")
    elif bias.any():
        if not traits.mask:
            raise mechanism.refuse("a key_padding_mask with values other than 0 and -inf", "mask")
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask + bias
        else:
            attn_mask = masks.merge(bias, attn_mask, q.dtype)
    return Masks(is_causal, key_mask, attn_mask)


def zero_padding(
    query: Tensor, key: Tensor, value: Tensor, padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (N, L, E), (N, S, E), (N, S, E) with zeros where padding holds NaN or infinities (``masks.drop_huge``).

    Queries change only where they are the same tensor as the keys. Arguments that are one tensor stay one.
    """
    if padding_mask is None:
        return query, key, value
    _check("key_padding_mask", padding_mask, (key.shape[0], key.shape[1]))
    visible = ~padding_mask if padding_mask.dtype == torch.bool else padding_mask != float("-inf")
    keys = masks.drop_huge(key, visible)
    return keys if query is key else query, keys, keys if value is key else masks.drop_huge(value, visible)


def append_keys(visible: Masks, length: int, keys: int, count: int, like: Tensor) -> Masks:
    """The masks with ``count`` keys appended that every query may see."""
    is_causal, key_mask, attn_mask = visible
    if is_causal:  # a causal query does not see keys that come last: an explicit mask lets it
        causal = masks.causal(length, keys, like.device)
        attn_mask = causal if attn_mask is None else masks.merge(attn_mask, causal, like.dtype)
    if key_mask is not None:
        key_mask = F.pad(key_mask, (0, count), value=True)
    if attn_mask is not None:
        attn_mask = F.pad(attn_mask, (0, count), value=attn_mask.dtype == torch.bool)
    return Masks(False, key_mask, attn_mask)


def _check(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} must be boolean (True = ignore) or floating point (added); got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; it must be {' or '.join(map(str, shapes))}")


def _invert(attn_mask: Tensor, batch: int) -> Tensor:
    """torch's mask as (L, S) or (N, H, L, S), True = may be seen."""
    mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
    return mask.unflatten(0, (batch, -1)) if mask.dim() == 3 else mask


def _equals_causal(attn_mask: Tensor, hint: bool) -> bool:
    """Whether torch's mask is the causal one: query i sees keys up to i + S - L, unchanged."""
    length, keys = attn_mask.shape[-2:]
    if symbolic():
        return hint and length == keys
    causal = masks.causal(length, keys, attn_mask.device)
    if attn_mask.dtype == torch.bool:
        return bool((attn_mask != causal).all())
    return bool(torch.where(causal, attn_mask == 0, attn_mask == float("-inf")).all())
