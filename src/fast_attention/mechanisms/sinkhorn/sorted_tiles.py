"""Own and sorted blocks in tiles that stay in the cache: the eager passes of ``sorted_blocks.py``.

A head's keys and values are sorted some blocks at a time into memory that is used again, so that nothing as large as
the sequence is made but outputs and gradients. Where causal, only blocks before the tile's end are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.sparse.tiles import attend, gradients

BLOCKS, EARLIER = 128, 64  # of a tile, and where later blocks are left out: with fewer, the product that sorts is slow


class _Work(NamedTuple):
    """One tile: its head, its blocks of queries, their own blocks of keys, and how many blocks may be sorted."""

    head: int
    rows: slice
    own: slice
    reach: int
    bias: Tensor | None


def _work(q: Tensor, k: Tensor, v: Tensor, first: int, is_causal: bool) -> Iterator[_Work]:
    """The tiles of every head, the last first: its reach is the widest, so it may write where others add."""
    heads, count, size, _ = q.shape
    together = EARLIER if is_causal else BLOCKS
    starts = range(0, count, together)
    bias = _bias(size, q) if is_causal else None
    for head in range(heads):
        for start in reversed(starts):
            stop = min(start + together, count)
            mine = bias
            if bias is not None and first + start == 0:  # nothing is before the first block
                mine = bias.expand(stop - start, -1, -1).clone()
                mine[0, :, :size] = float("-inf")
            reach = first + stop if is_causal else k.shape[1]
            yield _Work(head, slice(start, stop), slice(first + start, first + stop), reach, mine)


def _bias(size: int, like: Tensor) -> Tensor:
    hidden = F.pad(~masks.causal(size, size), (size, 0))
    return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))


def _flat(x: Tensor) -> Tensor:
    """(..., n, b, E) -> (heads, n, b, E) whose blocks are whole rows in memory."""
    return x.reshape(-1, *x.shape[-3:]).contiguous()


def _joined(x: Tensor, S: Tensor, work: _Work, name: str, scratch: Workspace) -> Tensor:
    """(blocks, 2 b, E): what is sorted to every block, and beside it the block itself."""
    size = x.shape[2]
    both = scratch(name, S.shape[0], 2 * size, x.shape[3])
    torch.mm(S, x[work.head, : work.reach].flatten(1), out=both[:, :size].flatten(1))
    both[:, size:].copy_(x[work.head, work.own])
    return both


def forward(
    q: Tensor, S: Tensor, k: Tensor, v: Tensor, *, keep: bool, first: int, is_causal: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``sorted_softmax``; nothing is kept."""
    out, scale = q.new_empty(*q.shape[:-1], v.shape[-1]), q.shape[-1] ** -0.5
    flat, scratch = out.view(-1, *out.shape[-3:]), Workspace(q)
    q, k, v, S = _flat(q), _flat(k), _flat(v), S.reshape(-1, *S.shape[-2:])
    for work in _work(q, k, v, first, is_causal):
        sort = S[work.head, work.rows, : work.reach]
        keys, values = (_joined(x, sort, work, name, scratch) for x, name in ((k, "k"), (v, "v")))
        mine, into = q[work.head, work.rows], flat[work.head, work.rows]
        attend(mine, keys, values, work.bias, None, scale=scale, scratch=scratch, out=into)
    return out, ()


def backward(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...],
    gradient: tuple[Tensor, ...], *, first: int, is_causal: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of queries, permutation, keys and values."""
    like = [x for x in inputs if x is not None]
    q, k, v = (_flat(like[i]) for i in (0, 2, 3))
    S, coming = like[1].reshape(-1, *like[1].shape[-2:]), _flat(gradient[0])
    scale, scratch = q.shape[-1] ** -0.5, Workspace(q)
    dq, dS, dk, dv = torch.empty_like(q), torch.empty_like(S), torch.empty_like(k), torch.empty_like(v)
    for work in _work(q, k, v, first, is_causal):
        head, rows, reach = work.head, work.rows, work.reach
        sort, slope = S[head, rows, :reach], dS[head, rows]
        keys, values = (_joined(x, sort, work, name, scratch) for x, name in ((k, "k"), (v, "v")))
        found = gradients(
            q[head, rows], keys, values, coming[head, rows], work.bias, None, scale=scale, scratch=scratch,
            dq=dq[head, rows],
        )  # fmt: skip
        slope[:, reach:] = 0.0
        last = rows.stop == q.shape[1]
        _unsort(k[head], found[1], sort, dk[head], slope[:, :reach], work.own, last=last, beta=0.0)
        _unsort(v[head], found[2], sort, dv[head], slope[:, :reach], work.own, last=last, beta=1.0)
    return tuple(x.view(y.shape) for x, y in zip((dq, dS, dk, dv), like, strict=True))


def _unsort(
    x: Tensor, both: Tensor, sort: Tensor, dx: Tensor, slope: Tensor, own: slice, *, last: bool, beta: float
) -> None:
    """Adds the gradient of ``_joined`` to those of a head's blocks and, ``beta`` times itself, of its permutation."""
    size, reach = x.shape[1], sort.shape[1]
    there = both[:, :size].flatten(1)
    torch.addmm(slope, there, x[:reach].flatten(1).mT, beta=beta, out=slope)
    dx[:reach].flatten(1).addmm_(sort.mT, there, beta=0.0 if last else 1.0)
    dx[own].add_(both[:, size:])
