"""Softmax inside a band in tiles that stay in the cache: the fast eager passes of ``banded.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.sparse.tiles import SCORES, attend, gradients

ROWS = 64  # queries of a tile
FEW = 4  # heads, below which stretches of one sequence make the batch of the products


class Tile(NamedTuple):
    """``number`` equal stretches of ``rows`` queries, ``step`` positions apart, each against ``span`` keys.

    Stretches of one tile share no key. ``bias`` (rows, span) is 0 or -inf, ``hidden`` (rows, span) marks what may not
    be seen where some query sees nothing at all.
    """

    first: int
    rows: int
    low: int
    span: int
    number: int = 1
    step: int = 0
    bias: Tensor | None = None
    hidden: Tensor | None = None

    def queries(self, x: Tensor) -> Tensor:
        """The queries (heads or number, rows, E) out of ``x`` (heads, length, E)."""
        return self._cut(x, self.first, self.rows)

    def keys(self, x: Tensor) -> Tensor:
        """The keys (heads or number, span, E) out of ``x`` (heads, keys, E)."""
        return self._cut(x, self.low, self.span)

    def _cut(self, x: Tensor, start: int, size: int) -> Tensor:
        if self.number == 1:
            return x[:, start : start + size]
        return x[0, start : start + (self.number - 1) * self.step + size].unfold(0, size, self.step).mT


def _bias(seen: Tensor, like: Tensor) -> Tensor | None:
    return None if seen.all() else torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, float("-inf"))


def _tiles(band: Tensor, length: int, keys: int, behind: int, front: int, heads: int, like: Tensor) -> Iterator[Tile]:
    """All queries in tiles; few heads get many stretches of the sequence side by side instead."""
    block, start = band.shape[0], keys - length - front - behind
    count = (length + front + block - 1) // block
    for r in range(0, block, ROWS):
        seen = band[r : r + ROWS]
        columns = seen.any(0).nonzero()
        low, high = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 1)
        seen, rows, span = seen[:, low:high], len(seen), high - low
        q0, k0, bias = r - front, start + low, _bias(seen, like)
        whole = max(-(min(q0, k0) // block), 0)  # blocks from here to ``cut`` lie inside the sequence
        cut = max(min((length - rows - q0) // block, (keys - span - k0) // block) + 1, whole)
        number = 1 if heads > 1 else max(min(SCORES // (rows * span), (cut - whole) // -(-span // block)), 1)
        each = (cut - whole) // number
        for n in range(whole, whole + each):
            yield Tile(q0 + n * block, rows, k0 + n * block, span, number, each * block, bias)
        for n in (*range(min(whole, count)), *range(whole + each * number, count)):
            tile = _clipped(q0 + n * block, k0 + n * block, seen, length, keys, like)
            if tile.rows > 0:
                yield tile


def _clipped(first: int, low: int, seen: Tensor, length: int, keys: int, like: Tensor) -> Tile:
    """The part of a tile that lies inside the sequence."""
    up, left = max(-first, 0), max(-low, 0)
    seen = seen[up : max(length - first, 0), left : max(keys - low, 0)]
    tile = Tile(first + up, seen.shape[0], low + left, seen.shape[1])
    if seen.any(-1).all():
        return tile._replace(bias=_bias(seen, like))
    return tile._replace(hidden=~seen)


def _hidden(tile: Tile, seen: Tensor | None) -> Tensor | None:
    """What may not be seen, by the tile or by the key mask ``seen`` (heads, keys)."""
    if seen is None:
        return tile.hidden
    mine = tile.keys(seen[..., None])[..., 0]
    if mine.all():
        return tile.hidden
    return ~mine[:, None] if tile.hidden is None else tile.hidden | ~mine[:, None]


class _Work(NamedTuple):
    """One tile of one group of heads: its cut out of every tensor, and the arguments of ``attend``."""

    tile: Tile
    group: slice
    hidden: Tensor | None


def _work(q: Tensor, k: Tensor, band: Tensor, seen: Tensor | None, behind: int, front: int) -> Iterator[_Work]:
    heads, length, keys = q.shape[0], q.shape[1], k.shape[1]
    together = max(SCORES // (min(band.shape[0], ROWS) * band.shape[1]), 2)  # two: one for each core
    size = together if heads >= FEW else 1
    tiles = list(_tiles(band, length, keys, behind, front, size, q))
    for head in range(0, heads, size):
        group = slice(head, head + size)
        for tile in tiles:
            yield _Work(tile, group, _hidden(tile, None if seen is None else seen[group]))


def _flat(x: Tensor) -> Tensor:
    """(..., length, E) -> (heads, length, E) with neighbouring numbers in the last axis."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _inputs(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    seen = None
    if key_mask is not None and not key_mask.all():
        seen = key_mask.expand(k.shape[:-1]).reshape(-1, k.shape[-2])
    return _flat(q), _flat(k), _flat(v), seen


def forward(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, key_mask: Tensor | None,
    *, keep: bool, behind: int, front: int, scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """``banded_softmax``; nothing is kept."""
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    q, k, v, seen = _inputs(q, k, v, key_mask)
    flat, scratch = out.view(-1, *out.shape[-2:]), Workspace(q)
    for tile, group, hidden in _work(q, k, band, seen, behind, front):
        parts = tile.queries(q[group]), tile.keys(k[group]), tile.keys(v[group])
        tile.queries(flat[group]).copy_(attend(*parts, tile.bias, hidden, scale=scale, scratch=scratch))
    return out, ()


def backward(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...],
    gradient: tuple[Tensor, ...], *, behind: int, front: int, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of queries, keys and values."""
    q, k, v, band = (x for x in inputs[:4] if x is not None)
    key_mask = inputs[4]
    like = q, k, v
    q, k, v, seen = _inputs(q, k, v, key_mask)
    flat, scratch = _flat(gradient[0]), Workspace(q)
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for tile, group, hidden in _work(q, k, band, seen, behind, front):
        parts = tile.queries(q[group]), tile.keys(k[group]), tile.keys(v[group]), tile.queries(flat[group])
        found = gradients(*parts, tile.bias, hidden, scale=scale, scratch=scratch)
        tile.queries(dq[group]).copy_(found[0])
        tile.keys(dk[group]).add_(found[1])
        tile.keys(dv[group]).add_(found[2])
    return *(x.view(y.shape) for x, y in zip((dq, dk, dv), like, strict=True)), None, None
