"""Softmax of blocks of queries over gathered blocks of keys, and the tables that say which."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.blocks import join, split, split_mask
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.fused import fused_attention, takes_flash
from fast_attention.engine.opaque import Opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import exporting
from fast_attention.mechanisms.sparse import gathered_tiles
from fast_attention.mechanisms.sparse.banded import blockwise_softmax

WORD = 0xFFFFFFFF


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
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of every block of ``size`` queries over the blocks of keys that ``table`` names.

    A block named twice counts once, -1 names none, and a query that sees nothing gets zeros. The blocks of queries
    before ``start`` and from ``stop`` on see all keys, whatever the table and ``key_mask`` say.
    """
    factor, stop = q.shape[-1] ** -0.5 if scale is None else scale, table.shape[-2] if stop is None else stop
    return _OPAQUE(q, k, v, table, key_mask, size, is_causal, start, stop, float(factor))[0]


def _parts(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor,
    size: int, is_causal: int, start: int, stop: int, factor: float,
) -> tuple[Tensor]:  # fmt: skip
    return (_chosen(q, k, v, table, key_mask, size, bool(is_causal), start, stop, factor),)


_OPAQUE = Opaque(_parts, lambda q, k, v, *others: (v.new_empty(*q.shape[:-1], v.shape[-1]),))


def _chosen(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor,
    size: int, is_causal: bool, start: int, stop: int, factor: float,
) -> Tensor:  # fmt: skip
    settings: dict[str, Any] = {"size": size, "is_causal": is_causal, "scale": factor}
    sizes = {"rows": size, "choices": table.shape[-1]}
    if not q.is_cpu:
        dispatch.record("softmax in blocks", "tiles are for the CPU", **sizes)
        return _plain(q, k, v, table, key_mask, start=start, stop=stop, **settings)
    dispatch.record("softmax in tiles", "every block of queries reads a few blocks of keys", **sizes)
    if (start == 0 and stop == table.shape[-2]) or takes_flash(q, k, v, scale=factor):
        return _tiled(q, k, v, table, key_mask, start=start, stop=stop, **settings)
    out = _tiled(q, k, v, table, key_mask, start=0, stop=table.shape[-2], **settings)
    return _with_ends(out, q, k, v, start * size, stop * size, scale=factor)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor,
    *, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> Tensor:  # fmt: skip
    length, number = q.shape[-2], table.shape[-2]
    place = (table[..., None] * size + torch.arange(size, device=q.device)).flatten(-2)
    chosen = table.clamp(min=0)
    fresh = (table >= 0) & ~(table[..., None] == table[..., None, :]).tril(-1).any(-1)
    seen = split_mask(key_mask, size).expand(*table.shape[:-2], number, size)[..., None]
    mask = (fresh[..., None] & take(seen, chosen)[..., 0]).flatten(-2)[..., None, :]
    if is_causal:
        own = torch.arange(number, device=q.device)[:, None] * size + torch.arange(size, device=q.device)
        mask = mask & (place[..., None, :] <= own[..., None])
    keys, values = (take(split(x, size), chosen).flatten(-3, -2) for x in (k, v))
    out = join(blockwise_softmax(split(q, size), keys, values, mask, scale=scale), length)
    return out if start == 0 and stop == number else _with_ends(out, q, k, v, start * size, stop * size, scale=scale)


def _with_ends(out: Tensor, q: Tensor, k: Tensor, v: Tensor, first: int, last: int, *, scale: float) -> Tensor:
    """``out`` with the rows before ``first`` and from ``last`` on computed over all keys."""
    rows = fused_attention(torch.cat((q[..., :first, :], q[..., last:, :]), -2), k, v, scale=scale)
    return torch.cat((rows[..., :first, :], out[..., first:last, :], rows[..., first:, :]), -2)


_tiled = in_float32(CustomGradient(_plain, gathered_tiles.forward, gathered_tiles.backward))


def mixed(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A hash of 32-bit integers held in int64: two rounds of shift, exclusive or and multiplication."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & WORD  # below 2^59: exact, and the same on every device
    return (x >> 16) ^ x


def distinct(
    seeds: Int[Tensor, "..."], index: Int[Tensor, "..."], available: Int[Tensor, "..."], number: int
) -> Int[Tensor, "... number"]:
    """``min(number, available)`` different numbers below ``available`` for each index, in slots filled up with -1.

    Floyd's sampling (Bentley and Floyd 1987), driven by a hash of the seed, the index and the draw: the same seeds give
    the same choice at any length, and every set is equally likely.
    """
    start = mixed(mixed(seeds) ^ index)
    chosen: list[Tensor] = []
    for draw in range(number):
        last = available - number + draw
        pick = mixed(start ^ draw) % (last + 1).clamp(min=1)
        for earlier in chosen:
            pick = torch.where(pick == earlier, last, pick)
        chosen.append(torch.where(last >= 0, pick, -1))
    return torch.stack(torch.broadcast_tensors(*chosen), -1)
