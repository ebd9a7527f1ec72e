"""Softmax inside a band: sliding windows and neighbouring blocks of keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine import masks, offsets, tiles, trace
from fast_attention.engine.blocks import count, join, positions, slices, smaller
from fast_attention.engine.fused import blockwise_softmax
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.operation import Fast, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import symbolic, traced
from fast_attention.gpu import flex, patterns
from fast_attention.mechanisms.dense.softmax import softmax_attention


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    left: int,
    right: int,
    size: int,
    is_causal: bool,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
    attn_mask: Tensor | None,
    dropout: float,
    scale: float | None,
    bias: Positions | None,
    sinks: Float[Tensor, "heads"] | None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the keys near each query, which stands at position i + keys - length.

    Args:
        q, k, v: Queries, keys and values.
        left: Blocks of keys before its own that a query sees.
        right: Blocks behind its own; none where causal.
        size: Keys of a block, counted from the first key; 1: a window that moves with the query.
        is_causal: Whether later keys are hidden.
        key_mask, attn_mask, dropout: As in a call of a mechanism.
        scale: Factor on the dot products; None means 1/sqrt(width).
        bias: What scores gain by offsets.
        sinks: Scores of each head whose exponentials add to normalisers.
    """
    length, keys = q.shape[-2], k.shape[-2]
    right = 0 if is_causal else right
    if not symbolic():
        final = (keys - 1) // size
        last = final - (keys - length) // size
        if left >= final and (is_causal or right >= last):  # everything is near
            return softmax_attention(
                q, k, v, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout, scale=scale,
                bias=bias, sinks=sinks,
            )  # fmt: skip
        left, right = min(left, final), min(right, last)
    low, high = -(left + 1) * size + 1, (right + 1) * size - 1
    terms = offsets.between(bias, low, high - low + 1, q)
    settings: Any = {
        "left": left, "right": right, "size": size, "is_causal": is_causal,
        "scale": float(q.shape[-1] ** -0.5 if scale is None else scale), "first": low + keys - length,
    }  # fmt: skip
    if attn_mask is None and dropout == 0.0:
        return _banded(q, k, v, key_mask, *terms, sinks, **settings)
    trace.record("softmax in blocks", "dropout" if attn_mask is None else "a mask of the caller's")
    run = banded_softmax if bias is None else in_float32(banded_softmax)
    return run(q, k, v, key_mask, *terms, sinks, attn_mask, dropout=dropout, **settings)


def banded_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor | None = None,
    vectors: Tensor | None = None, sinks: Tensor | None = None, attn_mask: Tensor | None = None,
    *, scale: float, dropout: float = 0.0, first: int, **settings: Any,
) -> Tensor:  # fmt: skip
    """The reference, under any mask: blocks of queries read overlapping slices of keys, which are views.

    Terms of positions belong to offsets from ``first`` on.
    """
    length, keys = q.shape[-2], k.shape[-2]
    band, keys_left, front, before = _band(length, keys, q.device, **settings)
    block, span = band.shape
    keys_right, number, start = span - block - keys_left, count(length + front, block), keys - length - front
    terms = None
    if numbers is not None:
        # a tile has offsets 1 - keys_left - block to span - keys_left - 1; beyond those of the terms nothing is seen
        missing = (keys_left + block - 1 - before, span - keys_left - 1 + before - (numbers.shape[-1] - 1))
        vectors = None if vectors is None else pad(vectors, (0, 0, *missing))
        terms = Terms(pad(numbers, missing)[:, None], None if vectors is None else vectors[:, None])
    inside = torch.ones(keys, dtype=torch.bool, device=q.device) if key_mask is None else key_mask

    def attended(first: int, some: int, same: bool = False) -> Tensor:
        """Outputs of some blocks; where their masks are the same, of one mask for all."""
        at = start + first * block
        around = partial(slices, block=block, keys_left=keys_left, keys_right=keys_right, number=some, start=at)
        mask = band[None] if same else band & around(inside[..., None])[..., None, :, 0]
        if attn_mask is not None:
            rows = positions(some, block, block, first * block - front, q.device).clamp(min=0).clamp(max=length - 1)
            columns = positions(some, block, span, at - keys_left, q.device).clamp(min=0).clamp(max=keys - 1)
            full = attn_mask.expand(*attn_mask.shape[:-2], length, keys)
            mask = masks.merge(full[..., rows[:, :, None], columns[:, None, :]], mask, q.dtype)
        queries = slices(q, block=block, keys_left=0, keys_right=0, number=some, start=first * block - front)
        if terms is not None:
            bias = offsets.scores(queries, terms, span, scale=scale).to(q.dtype)
            mask = masks.merge(bias, mask, q.dtype) if mask.dtype == torch.bool else bias + mask
        added: Any = {"dropout": dropout, "scale": scale, "sinks": sinks, "has_bias": terms is not None}
        return blockwise_softmax(queries, around(k), around(v), mask, **added)

    begin = end = 0  # the blocks whose slices are within the keys: what they see is the same
    if key_mask is None and attn_mask is None and not traced():
        begin = -(min(start - keys_left, 0) // block)
        end = min((keys - start - block - keys_right) // block + 1, number)
    if end - begin < SHARING:
        out = attended(0, number)
    else:
        cuts = ((0, begin, False), (begin, end, True), (end, number, False))
        out = torch.cat([attended(first, stop - first, same) for first, stop, same in cuts if stop > first], -3)
    return join(out, front + length)[..., front:, :]


SHARING = 16  # blocks for which one mask is worth a call of its own
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 128  # of queries that share one slice of keys


def _band(
    length: int, keys: int, device: torch.device, *, left: int, right: int, size: int, is_causal: bool
) -> tuple[Tensor, int, int, int]:
    """Masks of a block of queries: what it sees of its slice, the keys of the slice before the block, the queries that
    are missing before the first block, and minus the first offset of the terms.
    """
    if size == 1:
        block = smaller(min(max(left, right, SMALLEST_BLOCK), LARGEST_BLOCK), length)
        return masks.band(block, left, right, left=left, right=right, device=device), left, 0, left
    several = 1 if symbolic() else max(SMALLEST_BLOCK // size, 1)  # small blocks share one slice of keys
    rows, front, keys_left, keys_right = several * size, (keys - length) % size, left * size, right * size
    before = (left + 1) * size - 1
    if not symbolic() and front + length <= size:  # one block, and no key after its last query
        rows, keys_left, keys_right, front = length, min(keys_left + front, max(keys - length, 0)), 0, 0
    band = masks.band(rows, keys_left, keys_right, left=None, right=0 if is_causal else None, device=device)
    if several > 1 and rows > size:
        near = masks.band(several, left, right, left=left, right=right, device=device)
        band = band & near.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return band, keys_left, front, before


def _plan(q: Tensor, k: Tensor, *, left: int, right: int, size: int, is_causal: bool) -> tiles.Plan:
    length, keys = q.shape[-2], k.shape[-2]
    if size == 1:
        return tiles.window(length, keys, left, right)
    return tiles.blocks(length, keys, size, left, right, is_causal)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *added: None, left: int, right: int, size: int,
    is_causal: bool, scale: float, first: int,
) -> Tensor:  # fmt: skip
    if size == 1:
        near = patterns.window(q, k, left=left, right=right)
    else:
        near = patterns.blocks(q, k, size, before=left, after=right, is_causal=is_causal)
    return flex.attend(q, k, v, near, key_mask, scale=scale)


_banded = tiles.operation(
    banded_softmax,
    _plan,
    path="softmax in blocks",
    why="only keys near a block of queries are seen",
    cuda=Fast(_flex, None, serves=patterns.against),
    empty=like_queries,
)
