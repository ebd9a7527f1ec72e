"""Softmax inside a band: blocks of queries against the slice of keys around them, one fused call for all blocks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from fast_attention.ops import masks


def slices(
    x: Shaped[Tensor, "..."], *, block: int, behind: int, ahead: int, count: int, start: int = 0, axis: int = -2
) -> Shaped[Tensor, "..."]:
    """Overlapping slices of the sequence axis (-1 or -2): (..., S, E) -> (..., count, span, E), without a copy.

    Slice n holds the positions from ``start + n * block - behind`` to ``start + (n + 1) * block - 1 + ahead``, so that
    ``span = behind + block + ahead``. Positions outside the sequence hold 0; integers there hold -1.
    """
    front = behind - start
    back = count * block + behind + ahead - front - x.shape[axis]
    padding = (0, 0, front, back) if axis == -2 else (front, back)
    integers = not (x.is_floating_point() or x.dtype == torch.bool)
    x = F.pad(x, padding, value=-1 if integers else 0).unfold(axis, behind + block + ahead, block)
    return x.transpose(-1, -2) if axis == -2 else x


def reach(
    block: int, behind: int, ahead: int, *, left: int | None, right: int | None, device: torch.device
) -> Bool[Tensor, "block span"]:
    """Which keys of its slice a query sees: from ``left`` positions before it to ``right`` after; None: no limit."""
    rows = torch.arange(block, device=device)[:, None]
    distance = torch.arange(behind + block + ahead, device=device)[None, :] - behind - rows
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask = mask & (distance >= -left)
    return mask if right is None else mask & (distance <= right)


def blockwise_softmax(
    q: Float[Tensor, "*batch blocks rows width"],
    k: Float[Tensor, "*batch blocks span width"],
    v: Float[Tensor, "*batch blocks span values"],
    mask: Shaped[Tensor, "*#batch2 blocks #rows span"],
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "*batch blocks rows values"]:
    """Softmax attention of every block of queries over its own keys; a query that sees nothing gets zeros.

    The blocks stand where the fused kernels expect heads. A ``mask`` without leading axes is shared by all of them.
    """
    lead = q.shape[:-3]
    if mask.ndim > 3:
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
    folded = [x.flatten(0, -4) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*folded, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.unflatten(0, lead)


def banded_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    band: Bool[Tensor, "block span"],
    *,
    behind: int,
    front: int = 0,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of query blocks over the keys from ``behind`` positions before each block on, through ``band``.

    Query i stands at position i + keys - length. The first block begins ``front`` positions before the first query.
    Holds length * span scores at most, never length * keys.
    """
    length, keys = q.shape[-2], k.shape[-2]
    block, span = band.shape
    ahead = span - block - behind
    count = (length + front + block - 1) // block
    back, start = count * block - front - length, keys - length - front

    def around(x: Tensor, axis: int = -2) -> Tensor:
        return slices(x, block=block, behind=behind, ahead=ahead, count=count, start=start, axis=axis)

    real = torch.ones(keys, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    mask = band & around(real, -1)[..., None, :]
    if attn_mask is not None:
        wide = attn_mask.expand(*attn_mask.shape[:-2], length, keys)
        wide = F.pad(wide, (behind - start, count * block + span - block - behind + start - keys, front, back))
        columns = torch.arange(count, device=q.device)[:, None] * block + torch.arange(span, device=q.device)
        wide = wide.unflatten(-2, (count, block))
        mask = masks.merge(wide.gather(-1, columns[:, None].expand(*wide.shape[:-1], span)), mask, q.dtype)
    rows = F.pad(q, (0, 0, front, back)).unflatten(-2, (count, block))
    out = blockwise_softmax(rows, around(k), around(v), mask, dropout=dropout, scale=scale)
    return out.flatten(-3, -2)[..., front : front + length, :]
