"""Softmax inside a band: sliding windows and neighbouring blocks of keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fast_attention.engine import offsets, tiles, trace
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.operation import Fast, like_queries
from fast_attention.gpu import flex, patterns
from fast_attention.mechanisms.sparse import reference


def near(
    q: Tensor, k: Tensor, *, left: int, right: int, size: int = 0, is_causal: bool = False, block: int = 0,
    scale: float | None, bias: Positions | None,
) -> tuple[Terms | tuple[None, None], dict[str, Any]]:  # fmt: skip
    """Numbers that scores gain by offsets, and the settings of softmax over the keys near each query.

    Args:
        q: Queries, which stand at position i + keys - length.
        k: Keys.
        left: Keys before the query that it sees, or with ``size`` blocks before its own.
        right: Keys behind it, or blocks behind its own.
        size: Keys of a block, counted from the first key; 0: the window moves with the query.
        is_causal: Whether later keys of a block are hidden; a window's ``right`` is 0 then.
        block: Queries that share a slice of keys in the reference; 0: as many as are fast.
        scale: Factor on the dot products; None means 1/sqrt(width).
        bias: What scores gain by offsets.
    """
    low, high = (-left, right) if size == 0 else (-(left + 1) * size + 1, (right + 1) * size - 1)
    return offsets.between(bias, low, high - low + 1, q), {
        "left": left, "right": right, "size": size, "is_causal": is_causal, "block": block,
        "scale": float(q.shape[-1] ** -0.5 if scale is None else scale), "first": low + k.shape[-2] - q.shape[-2],
    }  # fmt: skip


def masked_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Tensor | None, attn_mask: Tensor | None,
    dropout: float, **settings: Any,
) -> Tensor:  # fmt: skip
    """``banded_softmax`` under a mask of all pairs, with dropout, or both."""
    trace.record("softmax in blocks", "dropout" if attn_mask is None else "a mask of the caller's")
    return reference.banded_softmax(q, k, v, key_mask, *others, attn_mask=attn_mask, dropout=dropout, **settings)


def _plan(q: Tensor, k: Tensor, *, left: int, right: int, size: int, is_causal: bool, block: int) -> tiles.Plan:
    length, keys = q.shape[-2], k.shape[-2]
    if size == 0:
        return tiles.window(length, keys, left, right)
    return tiles.blocks(length, keys, size, left, right, is_causal)


def _serves(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *added: Tensor | None, **settings: Any) -> str:
    """Why FlexAttention does not compute a call."""
    if any(x is not None for x in added):
        return "positions or sinks add to the scores"
    return patterns.against(q, k, v, key_mask)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *added: None, left: int, right: int, size: int,
    is_causal: bool, block: int, scale: float, first: int,
) -> Tensor:  # fmt: skip
    if size == 0:
        near = patterns.window(q, k, left=left, right=right)
    else:
        near = patterns.blocks(q, k, size, before=left, after=right, is_causal=is_causal)
    return flex.attend(q, k, v, near, key_mask, scale=scale)


banded_softmax = tiles.operation(
    reference.banded_softmax,
    _plan,
    path="softmax in blocks",
    why="only keys near a block of queries are seen",
    cuda=Fast(_flex, None, serves=_serves),
    empty=like_queries,
)
