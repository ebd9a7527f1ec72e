"""Softmax over bands and over gathered blocks in plain differentiable operations: one fused call for all blocks."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fast_attention.engine import masks, offsets
from fast_attention.engine.blocks import count, join, positions, slices, split, split_mask
from fast_attention.engine.fused import biased_attention, fused_attention, open_attention
from fast_attention.engine.offsets import Terms
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import exporting


def banded_softmax(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, key_mask: Tensor | None, numbers: Tensor | None = None,
    vectors: Tensor | None = None, sinks: Tensor | None = None, attn_mask: Tensor | None = None,
    *, behind: int, front: int, scale: float, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Softmax attention inside a band, under any mask; arguments as in ``banded.py``."""
    length, keys = q.shape[-2], k.shape[-2]
    block, span = band.shape
    number, start = count(length + front, block), keys - length - front

    def around(x: Tensor) -> Tensor:
        return slices(x, block=block, behind=behind, ahead=span - block - behind, number=number, start=start)

    inside = torch.ones(keys, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    mask = band & around(inside[..., None])[..., None, :, 0]
    if attn_mask is not None:
        rows = positions(number, block, block, -front, q.device).clamp(min=0).clamp(max=length - 1)
        columns = positions(number, block, span, start - behind, q.device).clamp(min=0).clamp(max=keys - 1)
        full = attn_mask.expand(*attn_mask.shape[:-2], length, keys)
        mask = masks.merge(full[..., rows[:, :, None], columns[:, None, :]], mask, q.dtype)
    queries = slices(q, block=block, behind=0, ahead=0, number=number, start=-front)
    if numbers is not None:
        terms = Terms(numbers[:, None], None if vectors is None else vectors[:, None])
        bias = offsets.scores(queries, terms, span, scale=scale).to(q.dtype)
        mask = masks.merge(bias, mask, q.dtype) if mask.dtype == torch.bool else bias + mask
    if numbers is None and sinks is None:
        out = blockwise_softmax(queries, around(k), around(v), mask, dropout=dropout, scale=scale)
    else:
        sinks = None if sinks is None else sinks[:, None]
        out = biased_attention(queries, around(k), around(v), mask, dropout=dropout, scale=scale, sinks=sinks)
    return join(out, front + length)[..., front:, :]


biased_softmax = in_float32(banded_softmax)  # numbers of thousands are no numbers of low precision


def gathered_softmax(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, *, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> Tensor:  # fmt: skip
    """Softmax attention over the blocks of keys that a table names; arguments as in ``gathered.py``."""
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
    lead = q.shape[:-3]
    if mask.ndim > 3:
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
    q, k, v = (x.flatten(0, -4) for x in (q, k, v))
    return fused_attention(q, k, v, mask, dropout=dropout, scale=scale).unflatten(0, lead)


def take(blocks: Tensor, table: Int[Tensor, "*batch_and_taken"]) -> Tensor:
    """(*batch, n, size, E) at ``table`` (*batch, *taken) -> (*batch, *taken, size, E): whole rows are copied."""
    lead, row = blocks.shape[:-3], blocks.shape[-2:]
    if exporting():  # see blocks.py: a flattened table cannot be proved to unflatten again
        ones = [1] * table.ndim
        which = [torch.arange(n, device=blocks.device).view(*ones[:i], n, *ones[i + 1 :]) for i, n in enumerate(lead)]
        return blocks[(*which, table)]
    which = torch.arange(lead.numel(), device=blocks.device).view(*lead, *[1] * (table.ndim - len(lead)))
    rows = blocks.reshape(-1, *row).index_select(0, (table + which * blocks.shape[-3]).flatten())
    return rows.view(*table.shape, *row)
