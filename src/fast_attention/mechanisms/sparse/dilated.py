"""Dilated attention: tokens so many positions apart become sequences of their own, each attended to by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine.blocks import join, split, split_mask, split_row
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.tracing import symbolic

Attend = Callable[..., Tensor]  # (q, k, v, key_mask=, attn_mask=), queries ending where keys end; by heads: dilation=


def dilated(
    attend: Attend,
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads keys width"],
    v: Float[Tensor, "*batch heads keys values"],
    *,
    dilation: int,
    is_causal: bool,
    key_mask: Bool[Tensor, "*#batch2 1 keys"] | None,
    attn_mask: Tensor | None,
) -> Float[Tensor, "*batch heads length values"]:
    """``attend`` among the tokens whose positions differ by multiples of ``dilation``.

    Both ends are padded to whole strides of ``dilation`` tokens, so that in every sequence queries again end where keys
    end. Padded keys are masked, except causally: there they stand behind every query.
    """
    length, keys = q.shape[-2], k.shape[-2]
    front = (keys - length) % dilation  # the first query's position within its stride
    if key_mask is None and not is_causal and (symbolic() or keys % dilation):
        key_mask = torch.ones(1, keys, dtype=torch.bool, device=k.device)
    visible = None if key_mask is None else split_mask(key_mask, dilation).movedim(-1, -3)
    if attn_mask is not None:
        attn_mask = _mask(attn_mask, length, keys, front, dilation)
    q = pad(q, (0, 0, front, 0)) if symbolic() or front else q
    out = attend(*(_strided(x, dilation) for x in (q, k, v)), key_mask=visible, attn_mask=attn_mask)
    out = join(out.movedim(-4, -2), front + length)
    return out[..., front:, :] if symbolic() or front else out


def by_heads(
    attend: Attend,
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads keys width"],
    v: Float[Tensor, "*batch heads keys values"],
    *,
    dilations: tuple[int, ...],
    key_mask: Bool[Tensor, "*#batch2 1 keys"] | None,
    attn_mask: Tensor | None,
    bias: Positions | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """``attend`` with ``dilation``, for head h the one at h modulo their number, and with its ``bias``."""
    number, heads, parts = len(dilations), q.shape[-3], []
    for first, dilation in enumerate(dilations[:heads]):
        every = slice(first, None, number)
        mask = attn_mask
        if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = mask[..., every, :, :]
        turn = (x[..., every, :, :] for x in (q, k, v))
        part = None if bias is None else partial(_of_heads, bias, every)
        parts.append(attend(*turn, key_mask=key_mask, attn_mask=mask, dilation=dilation, bias=part))
    order = [h for first in range(number) for h in range(first, heads, number)]  # the heads of the parts
    places = sorted(range(heads), key=order.__getitem__)
    return torch.cat(parts, -3)[..., places, :, :]


def _of_heads(bias: Positions, chosen: slice, offsets: Tensor) -> Terms:
    return bias(offsets).of_heads(chosen)


def _strided(x: Shaped[Tensor, "*batch heads length E"], dilation: int) -> Shaped[Tensor, "*batch dilation heads n E"]:
    """Every ``dilation``-th token, from each of the first on."""
    return split(x, dilation).movedim(-2, -4)


def _mask(attn_mask: Tensor, length: int, keys: int, front: int, dilation: int) -> Tensor:
    """What a mask of every query for every key says of each sequence: (..., dilation, #heads, n, m)."""
    full = attn_mask.expand(*attn_mask.shape[:-2], length, keys)
    full = pad(full, (0, 0, front, 0)) if attn_mask.ndim > 2 else pad(full, (0, 0, front, 0))[None]
    return split_row(split(full, dilation), dilation).diagonal(dim1=-3, dim2=-1).movedim(-1, -4)
