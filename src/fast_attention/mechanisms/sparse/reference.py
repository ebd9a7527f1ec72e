"""Softmax over bands and over gathered blocks in plain differentiable operations: one fused call for all blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine import masks, offsets
from fast_attention.engine.blocks import count, join, positions, slices, smaller, split, split_mask
from fast_attention.engine.fused import biased_attention, fused_attention, open_attention
from fast_attention.engine.offsets import Terms
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import exporting, symbolic


def banded_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor | None = None,
    vectors: Tensor | None = None, sinks: Tensor | None = None, attn_mask: Tensor | None = None,
    *, left: int, right: int, size: int, is_causal: bool, block: int, scale: float, first: int, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Softmax attention inside a band, under any mask; arguments as in ``banded.py``, ``first`` belongs to the terms.

    Blocks of queries read overlapping slices of keys, which are views.
    """
    settings: Any = {"left": left, "right": right, "size": size, "is_causal": is_causal, "block": block}
    attend = _banded if numbers is None else in_float32(_banded)  # numbers of thousands are no numbers of low precision
    return attend(
        q, k, v, key_mask, numbers, vectors, sinks, attn_mask, **settings, scale=scale, dropout=dropout
    )  # fmt: skip


def _banded(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, attn_mask: Tensor | None, *, scale: float, dropout: float, **settings: Any,
) -> Tensor:  # fmt: skip
    length, keys = q.shape[-2], k.shape[-2]
    band, keys_left, front, before = _band(length, keys, q.device, **settings)
    block, span = band.shape
    number, start = count(length + front, block), keys - length - front

    def around(x: Tensor) -> Tensor:
        return slices(
            x, block=block, keys_left=keys_left, keys_right=span - block - keys_left, number=number, start=start
        )

    inside = torch.ones(keys, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    mask = band & around(inside[..., None])[..., None, :, 0]
    if attn_mask is not None:
        rows = positions(number, block, block, -front, q.device).clamp(min=0).clamp(max=length - 1)
        columns = positions(number, block, span, start - keys_left, q.device).clamp(min=0).clamp(max=keys - 1)
        full = attn_mask.expand(*attn_mask.shape[:-2], length, keys)
        mask = masks.merge(full[..., rows[:, :, None], columns[:, None, :]], mask, q.dtype)
    queries = slices(q, block=block, keys_left=0, keys_right=0, number=number, start=-front)
    if numbers is not None:
        # a tile has offsets 1 - keys_left - block to span - keys_left - 1; beyond those of the terms nothing is seen
        missing = (keys_left + block - 1 - before, span - keys_left - 1 + before - (numbers.shape[-1] - 1))
        numbers = pad(numbers, missing)
        vectors = None if vectors is None else pad(vectors, (0, 0, *missing))
        terms = Terms(numbers[:, None], None if vectors is None else vectors[:, None])
        bias = offsets.scores(queries, terms, span, scale=scale).to(q.dtype)
        mask = masks.merge(bias, mask, q.dtype) if mask.dtype == torch.bool else bias + mask
    if numbers is None and sinks is None:
        out = blockwise_softmax(queries, around(k), around(v), mask, dropout=dropout, scale=scale)
    else:
        sinks = None if sinks is None else sinks[:, None]
        out = biased_attention(queries, around(k), around(v), mask, dropout=dropout, scale=scale, sinks=sinks)
    return join(out, front + length)[..., front:, :]


SMALLEST_BLOCK, LARGEST_BLOCK = 64, 128  # of queries that share one slice of keys


def _band(
    length: int, keys: int, device: torch.device, *, left: int, right: int, size: int, is_causal: bool, block: int
) -> tuple[Tensor, int, int, int]:
    """Masks of a block of queries: what it sees of its slice, the keys of the slice before the block, the queries that
    are missing before the first block, and minus the first offset of the terms.
    """
    if size == 0:
        block = block or smaller(min(max(left, right, SMALLEST_BLOCK), LARGEST_BLOCK), length)
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


def gathered_softmax(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, table: Tensor, *, size: int, is_causal: bool, scale: float, start: int, stop: int, first: int,
) -> Tensor:  # fmt: skip
    """Softmax attention over the blocks of keys that a table names; arguments as in ``gathered.py``."""
    attend = _gathered if numbers is None else in_float32(_gathered)
    settings: Any = {"size": size, "is_causal": is_causal, "scale": scale, "start": start, "stop": stop}
    return attend(q, k, v, key_mask, numbers, vectors, sinks, table, **settings)


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, table: Tensor, *, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> Tensor:  # fmt: skip
    length, number = q.shape[-2], table.shape[-2]
    position = (table[..., None] * size + torch.arange(size, device=q.device)).flatten(-2)
    chosen = table.clamp(min=0)
    visible = split_mask(key_mask, size).expand(*table.shape[:-2], number, size)[..., None]
    mask = (first_named(table)[..., None] & take(visible, chosen)[..., 0]).flatten(-2)[..., None, :]
    queries = torch.arange(number, device=q.device)[:, None] * size + torch.arange(size, device=q.device)
    if is_causal:
        mask = mask & (position[..., None, :] <= queries[..., None])
    blocks, attend = split(q, size), blockwise_softmax
    if sinks is not None:
        attend = partial(biased_attention, sinks=sinks[:, None])
    if numbers is not None:
        index = (position[..., None, :] - queries[..., None] + (length - 1)).clamp(0, 2 * length - 2)
        bias = offsets.gathered(blocks, Terms(numbers, vectors), index, scale=scale)
        mask, attend = masks.merge(bias, mask, q.dtype), biased_attention if sinks is None else attend
    keys, values = (take(split(x, size), chosen).flatten(-3, -2) for x in (k, v))
    out = join(attend(blocks, keys, values, mask, scale=scale), length)
    return out if start == 0 and stop == number else with_ends(out, q, k, v, start * size, stop * size, scale=scale)


def first_named(table: Int[Tensor, "*batch choices"]) -> Tensor:
    """Whether a choice names a block that no choice before it names."""
    return (table >= 0) & ~(table[..., None] == table[..., None, :]).tril(-1).any(-1)


def with_ends(out: Tensor, q: Tensor, k: Tensor, v: Tensor, first: int, last: int, *, scale: float) -> Tensor:
    """``out`` with the rows before ``first`` and from ``last`` on computed over all keys."""
    rows = fused_attention(ends(q, first, last), k, v, scale=scale)
    return torch.cat((rows[..., :first, :], out[..., first:last, :], rows[..., first:, :]), -2)


def ends(x: Tensor, first: int, last: int) -> Tensor:
    """The rows before ``first`` and from ``last`` on."""
    return torch.cat((x[..., :first, :], x[..., last:, :]), -2)


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
    batch_shape = q.shape[:-3]
    if not batch_shape:
        return blockwise_softmax(q[None], k[None], v[None], mask, dropout=dropout, scale=scale)[0]
    if mask.ndim > 3:
        mask = mask.expand(*batch_shape, *mask.shape[-3:]).flatten(0, -4)
    q, k, v = (x.flatten(0, -4) for x in (q, k, v))
    return fused_attention(q, k, v, mask, dropout=dropout, scale=scale).unflatten(0, batch_shape)


def take(blocks: Tensor, table: Int[Tensor, "*batch_and_taken"]) -> Tensor:
    """(*batch, n, size, E) at ``table`` (*batch, *taken) -> (*batch, *taken, size, E): whole rows are copied."""
    batch_shape, row = blocks.shape[:-3], blocks.shape[-2:]
    if exporting():  # see blocks.py: a flattened table cannot be proved to unflatten again
        ones = [1] * table.ndim
        which = [
            torch.arange(n, device=blocks.device).view(*ones[:i], n, *ones[i + 1 :]) for i, n in enumerate(batch_shape)
        ]
        return blocks[(*which, table)]
    which = torch.arange(batch_shape.numel(), device=blocks.device).view(
        *batch_shape, *[1] * (table.ndim - len(batch_shape))
    )
    rows = blocks.reshape(-1, *row).index_select(0, (table + which * blocks.shape[-3]).flatten())
    return rows.view(*table.shape, *row)
