"""Softmax over parts of a grid of tokens: an image's, or a spectrogram's, row by row."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.fused import fused_attention, open_attention
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse import grid_reference as reference
from fast_attention.mechanisms.sparse.grid import Axis, visible
from fast_attention.mechanisms.sparse.grid_tiles import tiled_softmax

DENSE = 3  # times the keys of a tile that exact attention with a mask reads in a tile's time


def grid_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    key_mask: Bool[Tensor, "*#batch2 length"] | None,
    sinks: Float[Tensor, "heads"] | None = None,
    *,
    width: int,
    down: Axis,
    across: Axis,
    leading: int,
    scale: float | None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the keys whose row ``down`` and whose column ``across`` let a query see.

    The first ``leading`` tokens see all and are seen by all; then come the rows of a grid, ``width`` tokens each, the
    last of which may end early. A stripe of tiles is held at a time. The exponentials of ``sinks`` (H,) add to
    normalisers.
    """
    length = q.shape[-2]
    if not symbolic():
        height = -(-(length - leading) // width)
        if height <= 0 or (down.covers(height) and across.covers(width)):
            return softmax_attention(q, k, v, key_mask=key_mask, scale=scale, sinks=sinks)
        down, across = down.within(height), across.within(width)
        few = length <= DENSE * (down.span * (across.span + leading))
        if few and sinks is None and q.dtype.itemsize >= 4 and not dispatch.obstacle(q):
            dispatch.record("exact attention with the window as mask", "tiles would leave out few of so few keys")
            window = visible(length, width, down, across, leading, q.device)
            return softmax_attention(q, k, v, key_mask=key_mask, attn_mask=window, scale=scale)
    return _in_grid(
        q, k, v, key_mask, sinks, width=width, leading=leading,
        row_window=down.window, row_dilation=down.dilation, row_shift=down.shift, row_tile=down.tile,
        column_window=across.window, column_dilation=across.dilation, column_shift=across.shift,
        column_tile=across.tile, scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
    )  # fmt: skip


@opaque(like_queries)
def _in_grid(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None,
    *, width: int, leading: int, row_window: int, row_dilation: int, row_shift: int, row_tile: int,
    column_window: int, column_dilation: int, column_shift: int, column_tile: int, scale: float,
) -> Tensor:  # fmt: skip
    down = Axis(row_window, row_dilation, row_shift, row_tile)
    across = Axis(column_window, column_dilation, column_shift, column_tile)
    settings: dict[str, Any] = {"width": width, "down": down, "across": across, "scale": scale}
    if why := dispatch.obstacle(q, k):
        dispatch.record("softmax in blocks", why, rows=down.size, columns=across.size)
        out = reference.grid_softmax(q[..., leading:, :], k, v, key_mask, sinks, **settings)
    else:
        why = "only keys near a rectangle of queries are seen"
        dispatch.record("softmax in tiles", why, rows=down.size, columns=across.size)
        out = _padded(q[..., leading:, :], k, v, key_mask, sinks, **settings)
    if leading == 0:
        return out
    everything = None if key_mask is None else key_mask[..., None, :].expand(*q.shape[:-2], leading, k.shape[-2])
    attend = fused_attention if sinks is None else partial(open_attention, sinks=sinks)
    return torch.cat((attend(q[..., :leading, :], k, v, everything, scale=scale), out), -2)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: Tensor | None, *, width: int, **settings: Any
) -> Tensor:
    """``tiled_softmax`` of a grid whose last row may end early, filled up by keys that are masked."""
    length = q.shape[-2]
    if missing := -length % width:
        key_mask = torch.ones(1, k.shape[-2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
        key_mask = F.pad(key_mask, (0, missing))
    return tiled_softmax(q, k, v, key_mask, sinks, width=width, **settings)[..., :length, :]
