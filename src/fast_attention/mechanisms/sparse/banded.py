"""Softmax inside a band: blocks of queries against the slice of keys around them, one fused call for all blocks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from fast_attention.engine import dispatch, masks
from fast_attention.engine.blocks import count, join, positions, slices
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.fused import fused_attention, open_attention
from fast_attention.engine.opaque import Opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import exporting
from fast_attention.mechanisms.sparse import banded_tiles
from fast_attention.mechanisms.sparse.banded_tiles import ROWS


def covers_most(q: Tensor, keys: int, window: int) -> bool:
    """Whether the fused kernel over all keys, masked, beats tiles that read ``window`` keys around every query.

    A tile reads ``window + ROWS`` keys. On two threads a masked score costs the fused kernel about three quarters of
    what it costs a tile (8 heads of width 64, 192 to 640 keys); one tile alone, or low precision, stays with tiles.
    """
    if torch.compiler.is_compiling() or not q.is_cpu or q.dtype.itemsize < 4:
        return False
    return q.shape[-2] > ROWS and 3 * keys <= 4 * (window + ROWS)


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
        rows = positions(number, block, block, -front, q.device).clamp(min=0).clamp(max=length - 1)
        columns = positions(number, block, span, start - behind, q.device).clamp(min=0).clamp(max=keys - 1)
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
