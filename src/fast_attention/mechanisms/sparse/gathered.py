"""Softmax of blocks of queries over the blocks of keys that a table names for each."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import tiles
from fast_attention.engine.offsets import Positions
from fast_attention.engine.operation import Fast, like_queries
from fast_attention.gpu import flex, patterns
from fast_attention.mechanisms.sparse import reference


def gathered_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    table: Int[Tensor, "*batch blocks choices"],
    key_mask: Bool[Tensor, "*#batch2 length"],
    *,
    size: int,
    is_causal: bool = False,
    scale: float | None = None,
    start: int = 0,
    stop: int | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of every block of ``size`` queries over the blocks of keys that ``table`` names.

    A block named twice counts once, -1 names none, and a query that sees nothing gets zeros. The blocks of queries
    before ``start`` and from ``stop`` on see all keys, whatever the table says; give no mask then. ``bias`` gives what
    scores gain by offsets, and ``sinks`` make normalisers larger by ``e^sink``: both for blocks in the table only.
    """
    factor, stop = float(q.shape[-1] ** -0.5 if scale is None else scale), table.shape[-2] if stop is None else stop
    terms, length = (None, None), q.shape[-2]
    if bias is not None:
        terms = bias(torch.arange(1 - length, length, device=q.device))
    settings: Any = {"size": size, "is_causal": is_causal, "start": start, "stop": stop, "scale": factor}
    return _gathered(q, k, v, key_mask, *terms, sinks, table, first=1 - length, **settings)


def _plan(q: Tensor, k: Tensor, table: Tensor, *, size: int, is_causal: bool, start: int, stop: int) -> tiles.Plan:
    table = table.expand(*k.shape[:-2], *table.shape[-2:])
    table = table.reshape(-1, k.shape[-3] if k.ndim > 2 else 1, *table.shape[-2:])
    return tiles.chosen(table, k.shape[-2], size=size, is_causal=is_causal, start=start, stop=stop)


def _serves(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, table: Tensor, *, size: int, **settings: Any,
) -> str:  # fmt: skip
    """Why FlexAttention does not compute a call."""
    if numbers is not None or sinks is not None:
        return "positions or sinks add to the scores"
    return f"blocks of {size} tokens" if flex.SIZE % size else patterns.against(q, k, v, key_mask)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: None, vectors: None, sinks: None, table: Tensor, *,
    size: int, is_causal: bool, start: int, stop: int, scale: float, first: int,
) -> Tensor:  # fmt: skip
    visible = patterns.chosen(q, table, size=size, is_causal=is_causal, start=start, stop=stop)
    return flex.attend(q, k, v, visible, key_mask, scale=scale)


_gathered = tiles.operation(
    reference.gathered_softmax,
    _plan,
    path="softmax in blocks",
    why="every block of queries reads a few blocks of keys",
    sizes=lambda *tensors, size, **settings: {"rows": size, "choices": tensors[7].shape[-1]},
    cuda=Fast(_flex, None, serves=_serves),
    empty=like_queries,
)
