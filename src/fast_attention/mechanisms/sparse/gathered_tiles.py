"""Softmax over gathered blocks of keys in tiles that stay in the cache: the eager passes of ``gathered.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.blocks import pad_length, split_mask
from fast_attention.engine.fused import flash_backward, flash_forward
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.sparse.tiles import SCORES, attend, gradients


class Work(NamedTuple):
    """One block of queries of a group of heads: its rows, the rows of keys that it reads, and what it may see.

    ``table`` (heads * choices) counts the blocks of all heads; ``bias`` and ``hidden`` are as in ``tiles.py``.
    """

    group: slice
    rows: slice
    table: Tensor
    bias: Tensor | None
    hidden: Tensor | None


class Plan:
    """Who sees what: ``table`` (heads, blocks, choices) of blocks of ``size`` keys, -1 for none.

    Choices that are dead for all heads (named twice, none, or all in the future) are not read. What some heads see and
    others not is ``hidden``; where all heads agree, the triangle of a causal block and the end of the sequence are a
    ``bias`` that many tiles share.
    """

    def __init__(self, table: Tensor, seen: Tensor | None, like: Tensor, *, size: int, is_causal: bool) -> None:
        length, self.dtype = like.shape[-2], like.dtype
        self.size, self.is_causal, self.length = size, is_causal, length
        self.seen = None if seen is None else split_mask(seen, size)
        heads, self.blocks, _ = table.shape
        own = torch.arange(self.blocks)[:, None]
        fresh = (table >= 0) & ~(table[..., None] == table[..., None, :]).tril(-1).any(-1)
        fresh = fresh & (table <= own) if is_causal else fresh
        order = fresh.any(0).byte().argsort(dim=-1, descending=True, stable=True).expand_as(table)  # the dead come last
        self.fresh, self.table = fresh.gather(-1, order), table.gather(-1, order)
        alive = self.fresh.any(0)
        self.agreed = (alive == self.fresh.all(0)).all(-1).tolist()
        self.choices = alive.sum(-1).tolist()
        self.index = self.table.clamp(min=0) + torch.arange(heads)[:, None, None] * self.blocks
        self.special = [self._where(own if is_causal else own - own - 2), self._where(own - own + self.blocks - 1)]
        self.known: dict[tuple[int, ...], Tensor | None] = {}

    def _where(self, block: Tensor) -> list[int]:
        """Per block of queries: the choice that names ``block`` for all heads, -1 for no head, -2 for some."""
        named = self.fresh & (self.table == block)
        found = torch.where(named.all(0).any(-1), named.all(0).byte().argmax(-1), -1)
        return found.masked_fill((named.any(0) != named.all(0)).any(-1), -2).tolist()

    def tile(self, i: int, group: slice) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Index, bias and hidden of a block of queries."""
        number, size = self.choices[i], self.size
        index = self.index[group, i, :number]
        diagonal, end = self.special[0][i], self.special[1][i] if self.length % size else -1
        if self.seen is None and self.agreed[i] and diagonal > -2 and end > -2 and number > 0:
            return index.flatten(), self._bias(number, diagonal, end), None
        rows = min(size, self.length - i * size)
        keys = self.table[group, i, :number, None] * size + torch.arange(size)
        visible = self.fresh[group, i, :number, None] & (keys < self.length)
        if self.seen is not None:
            visible = visible & self.seen.flatten(0, 1)[index]
        visible = visible.flatten(1)[:, None]
        if self.is_causal:
            visible = visible & (keys.flatten(1)[:, None] <= torch.arange(i * size, i * size + rows)[:, None])
        return index.flatten(), None, ~visible

    def _bias(self, number: int, diagonal: int, end: int) -> Tensor | None:
        key = number, diagonal, end
        if key not in self.known:
            hidden = torch.zeros(self.size, number, self.size, dtype=torch.bool)
            if end >= 0:
                hidden[:, end, self.length % self.size :] = True
            if diagonal >= 0:
                hidden[:, diagonal] |= torch.ones(self.size, self.size, dtype=torch.bool).triu(1)
            bias = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf")).flatten(1)
            self.known[key] = bias if hidden.any() else None
        return self.known[key]

    def work(self, start: int, stop: int) -> Iterator[Work]:
        """The blocks from ``start`` to ``stop`` in groups of heads."""
        heads, size = self.table.shape[0], self.size
        together = max(SCORES // (size * size * self.table.shape[-1]), 2)  # two: one for each core
        for head in range(0, heads, together):
            group = slice(head, head + together)
            for i in range(start, stop):
                rows = slice(i * size, min((i + 1) * size, self.length))
                index, bias, hidden = self.tile(i, group)
                yield Work(group, rows, index, None if bias is None else bias[: rows.stop - rows.start], hidden)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _rows(x: Tensor, size: int) -> Tensor:
    """(..., length, E) -> (heads * blocks, size * E)."""
    return pad_length(x, size).reshape(-1, size * x.shape[-1])


def _plan(k: Tensor, table: Tensor, key_mask: Tensor, *, size: int, is_causal: bool) -> Plan:
    table = table.expand(*k.shape[:-2], *table.shape[-2:]).reshape(-1, *table.shape[-2:])
    seen = None if key_mask.all() else key_mask.expand(k.shape[:-1]).reshape(-1, k.shape[-2])
    return Plan(table, seen, k, size=size, is_causal=is_causal)


def _take(rows: Tensor, index: Tensor, name: str, work: int, width: int, scratch: Workspace) -> Tensor:
    out = scratch(name, index.shape[0], rows.shape[1])
    return torch.index_select(rows, 0, index, out=out).view(work, -1, width)


def _ends(x: Tensor, start: int, stop: int) -> Tensor:
    """The rows before ``start`` and from ``stop`` on."""
    return torch.cat((x[..., :start, :], x[..., stop:, :]), -2)


def forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor,
    *, keep: bool, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """``gathered_softmax``; kept are the ends' normalisers, and the ends' outputs as the kernel laid them out."""
    plan = _plan(k, table, key_mask, size=size, is_causal=is_causal)
    first, last = start * size, min(stop * size, q.shape[-2])
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    flat, queries, scratch = _flat(out), _flat(q), Workspace(q)
    keys, values = _rows(k, size), _rows(v, size)
    for group, rows, index, bias, hidden in plan.work(start, stop):
        mine = queries[group, rows]
        near = _take(keys, index, "k", mine.shape[0], q.shape[-1], scratch)
        there = _take(values, index, "v", mine.shape[0], v.shape[-1], scratch)
        flat[group, rows] = attend(mine, near, there, bias, hidden, scale=scale, scratch=scratch)
    if first == 0 and last == q.shape[-2]:
        return out, ()
    ends, kept = flash_forward(_ends(q, first, last), k, v, None, keep=keep, is_causal=False, scale=scale)
    out[..., :first, :], out[..., last:, :] = ends[..., :first, :], ends[..., first:, :]
    return out, (ends, *kept)


def backward(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...],
    gradient: tuple[Tensor, ...], *, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of queries, keys and values."""
    q, k, v, table, key_mask = (x for x in inputs if x is not None)
    plan = _plan(k, table, key_mask, size=size, is_causal=is_causal)
    keys, values, queries, scratch = _rows(k, size), _rows(v, size), _flat(q), Workspace(q)
    coming, dq = _flat(gradient[0].contiguous()), torch.empty_like(queries, memory_format=torch.contiguous_format)
    if kept:
        dk, dv = _end_gradients(inputs, kept, gradient[0], dq.view(q.shape), start * size, stop * size, scale=scale)
        dk, dv = (_rows(x, size).contiguous() for x in (dk, dv))
    else:
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for group, rows, index, bias, hidden in plan.work(start, stop):
        mine, here = queries[group, rows], coming[group, rows]
        near = _take(keys, index, "k", mine.shape[0], q.shape[-1], scratch)
        there = _take(values, index, "v", mine.shape[0], v.shape[-1], scratch)
        found = gradients(mine, near, there, here, bias, hidden, scale=scale, scratch=scratch)
        dq[group, rows] = found[0]
        dk.index_add_(0, index, found[1].view(-1, dk.shape[1]))  # a block of queries may see no key at all
        dv.index_add_(0, index, found[2].view(-1, dv.shape[1]))
    length = k.shape[-2]
    dk, dv = (x.view(*y.shape[:-2], -1, y.shape[-1])[..., :length, :] for x, y in ((dk, k), (dv, v)))
    return dq.view(q.shape), dk, dv, None, None


def _end_gradients(
    inputs: tuple[Tensor | None, ...], kept: tuple[Tensor, ...], gradient: Tensor, dq: Tensor, first: int, last: int,
    *, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the ends give to keys and values; their queries' gradients go into ``dq``."""
    q, k, v = (x for x in inputs[:3] if x is not None)
    ends = _ends(q, first, last), k, v, None
    sent = (_ends(gradient, first, last),)
    mine, dk, dv, _ = flash_backward(ends, kept[:1], kept[1:], sent, is_causal=False, scale=scale)
    assert mine is not None
    assert dk is not None
    assert dv is not None
    dq[..., :first, :], dq[..., last:, :] = mine[..., :first, :], mine[..., first:, :]
    return dk, dv
