"""Softmax inside a band: blocks of queries against the slice of keys around them, one fused call for all blocks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch, masks
from fast_attention.engine.blocks import count, fill, join
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.fused import fused_attention, open_attention
from fast_attention.engine.opaque import Opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import exporting
from fast_attention.mechanisms.sparse import banded_tiles
from fast_attention.mechanisms.sparse.banded_tiles import ROWS


def smaller(size: int, limit: int) -> int:
    """The smaller of a setting and a limit that depends on the length; the setting itself where lengths are traced."""
    return size if torch.compiler.is_compiling() else min(size, limit)


def covers_most(q: Tensor, keys: int, window: int) -> bool:
    """Whether the fused kernel over all keys, masked, beats tiles that read ``window`` keys around every query.

    A tile reads ``window + ROWS`` keys. On two threads a masked score costs the fused kernel about three quarters of
    what it costs a tile (8 heads of width 64, 192 to 640 keys); one tile alone, or low precision, stays with tiles.
    """
    if torch.compiler.is_compiling() or not q.is_cpu or q.dtype.itemsize < 4:
        return False
    return q.shape[-2] > ROWS and 3 * keys <= 4 * (window + ROWS)


def slices(
    x: Shaped[Tensor, "*batch keys width"], *, block: int, behind: int, ahead: int, number: int, start: int = 0
) -> Shaped[Tensor, "*batch number span width"]:
    """Overlapping slices of a sequence, ``span = behind + block + ahead``, without a copy.

    Slice n holds the positions from ``start + n * block - behind`` to ``start + (n + 1) * block - 1 + ahead``.
    Positions outside the sequence hold 0, or -1 where ``x`` holds integers.
    """
    length, span, first = x.shape[-2], behind + block + ahead, start - behind
    outside = 0 if x.is_floating_point() or x.dtype == torch.bool else -1
    if exporting():  # see blocks.py
        place = _places(number, block, span, first, x.device)
        taken = x[..., place.clamp(min=0).clamp(max=length - 1), :]
        return fill(taken, ((place < 0) | (place >= length))[..., None], outside)
    total = (number - 1) * block + span
    if first >= length or first + total <= 0:  # wholly outside, which F.pad cannot cut out
        padded = x.new_full((*x.shape[:-2], total, x.shape[-1]), outside)
    else:
        padded = F.pad(x, (0, 0, -first, total + first - length), value=outside)
    if torch.compiler.is_compiling():  # until torch 2.14, gradients of a compiled unfold are wrong or written elsewhere
        return _neighbours(padded, block, span, number)
    return padded.unfold(-2, span, block).transpose(-1, -2)


def _neighbours(x: Tensor, block: int, span: int, number: int) -> Tensor:
    """The same slices of ``x``, put together from neighbouring blocks."""
    blocks = F.pad(x, (0, 0, 0, -span % block)).unflatten(-2, (-1, block))
    parts = [blocks.narrow(-3, ahead, number) for ahead in range(count(span, block))]
    return torch.cat(parts, -2)[..., :span, :]


def _places(number: int, step: int, span: int, first: int, device: torch.device) -> Tensor:
    """(number, span): ``first + n * step + c``."""
    return torch.arange(number, device=device)[:, None] * step + torch.arange(span, device=device) + first


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
    if exporting():  # the fused kernels ask how strides compare, and ONNX's take four axes
        return open_attention(q, k, v, mask, dropout=dropout, scale=scale)
    lead = q.shape[:-3]
    if mask.ndim > 3:
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
    q, k, v = (x.flatten(0, -4) for x in (q, k, v))
    return fused_attention(q, k, v, mask, dropout=dropout, scale=scale).unflatten(0, lead)


def banded_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    band: Bool[Tensor, "block span"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    *,
    behind: int,
    front: int = 0,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of query blocks over the keys from ``behind`` positions before each block on, through ``band``.

    Query i stands at position i + keys - length. The first block begins ``front`` positions before the first query.
    Every query must see some position through ``band``, inside the sequence or not. Without ``attn_mask`` and dropout
    one tile of scores is held at a time, else length * span of them, never length * keys.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is None and dropout == 0.0 and q.is_cpu and 0 not in (*q.shape, *k.shape):
        dispatch.record(
            "softmax in tiles",
            "only keys near a block of queries are seen",
            rows=min(len(band), ROWS),
            keys=band.shape[1],
        )
        return _OPAQUE(q, k, v, band, key_mask, behind, front, float(factor))[0]
    dispatch.record(
        "softmax in blocks", "a mask of the caller's, dropout or another device", rows=len(band), keys=band.shape[1]
    )
    return _plain(q, k, v, band, key_mask, attn_mask, behind=behind, front=front, dropout=dropout, scale=factor)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, key_mask: Tensor | None, attn_mask: Tensor | None = None,
    *, behind: int, front: int, scale: float, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    length, keys = q.shape[-2], k.shape[-2]
    block, span = band.shape
    number, start = count(length + front, block), keys - length - front

    def around(x: Tensor) -> Tensor:
        return slices(x, block=block, behind=behind, ahead=span - block - behind, number=number, start=start)

    real = torch.ones(keys, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    mask = band & around(real[..., None])[..., None, :, 0]
    if attn_mask is not None:
        rows = _places(number, block, block, -front, q.device).clamp(min=0).clamp(max=length - 1)
        columns = _places(number, block, span, start - behind, q.device).clamp(min=0).clamp(max=keys - 1)
        whole = attn_mask.expand(*attn_mask.shape[:-2], length, keys)
        mask = masks.merge(whole[..., rows[:, :, None], columns[:, None, :]], mask, q.dtype)
    queries = slices(q, block=block, behind=0, ahead=0, number=number, start=-front)
    out = blockwise_softmax(queries, around(k), around(v), mask, dropout=dropout, scale=scale)
    return join(out, front + length)[..., front:, :]


_tiled = in_float32(CustomGradient(_plain, banded_tiles.forward, banded_tiles.backward))


def _parts(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, key_mask: Tensor | None, behind: int, front: int, scale: float
) -> tuple[Tensor]:
    return (_tiled(q, k, v, band, key_mask, behind=behind, front=front, scale=scale),)


_OPAQUE = Opaque(_parts, lambda q, k, v, *others: (v.new_empty(*q.shape[:-1], v.shape[-1]),))
