"""Softmax over the keys near a query and a few global ones, under one normaliser, in tiles.

This is the pattern of Longformer and LED, and of BigBird without its random blocks. A query sees a window of keys, and
keys that every query sees. The global ones are read once, before the loop, and each tile puts them beside its slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import tiled
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.precision import in_float32
from fast_attention.engine.workspace import Workspace

ROWS = 64  # queries of a tile
LOW = -1e30  # a hidden key's score: a query that sees only hidden keys gets numbers, not NaN
HIGHEST = 2**16  # dropout compares 16 random bits


class Window(NamedTuple):
    """The keys near a query: ``reach`` on each side of it, or of its whole tile of ``rows`` queries."""

    reach: int
    rows: int = ROWS
    by_tile: bool = False


def attend(
    q: Float[Tensor, "heads length width"],
    k: Float[Tensor, "heads length width"],
    v: Float[Tensor, "heads length width"],
    window: Window,
    *,
    scale: float,
    hidden: Bool[Tensor, "length"] | None = None,
    columns: Int[Tensor, "number"] | None = None,
    gains: Float[Tensor, "number"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "heads length width"]:
    """Softmax attention over a window and global keys; the result is laid out as (length, heads, width).

    Rows of queries that see no key hold finite numbers of no meaning.

    Args:
        q: Queries; as keys and values one sequence, with heads in front.
        k: Keys.
        v: Values.
        window: Which keys are near.
        scale: Factor on the dot products.
        hidden: Keys that no window shows: padding, and the global keys, which stand in ``columns``.
        columns: Positions of the keys that every query sees.
        gains: What the scores of ``columns`` gain.
        dropout: The share of weights that are set to zero.
    """
    settings: Any = {"window": window, "scale": scale, "dropout": dropout}
    settings["seed"] = int(torch.randint(2**62, ())) if dropout else 0
    return _attend(q, k, v, hidden, columns, gains, **settings)


class _Tile(NamedTuple):
    """Some heads' queries, their slice of keys, what is added to scores, and which weights are dropped."""

    heads: slice
    rows: slice
    keys: slice
    bias: Float[Tensor, "rows keys"] | None
    dropped: Bool[Tensor, "heads rows keys"] | None


def _tiles(
    q: Tensor, hidden: Tensor | None, columns: Tensor | None, gains: Tensor | None, window: Window,
    dropout: float, seed: int,
) -> Iterator[_Tile]:  # fmt: skip
    """Every tile, in the same order and with the same random numbers in every pass."""
    heads, length = q.shape[:2]
    number = 0 if columns is None else len(columns)
    together = tiled.heads_together(min(window.rows, length) * (min(window.rows + 2 * window.reach, length) + number))
    generator = torch.Generator().manual_seed(seed) if dropout else None
    biases: dict[tuple[int, int, int], Tensor | None] = {}
    for head in range(0, heads, together):
        group = slice(head, min(head + together, heads))
        for first in range(0, length, window.rows):
            stop = min(first + window.rows, length)
            low, high = max(first - window.reach, 0), min(stop + window.reach, length)
            place = stop - first, low - first, high - first
            if place not in biases:
                biases[place] = _bias(*place, window, number, gains, q)
            bias = biases[place]
            if hidden is not None and hidden[low:high].any():
                bias = q.new_zeros(stop - first, number + high - low) if bias is None else bias.clone()
                bias[:, number:].masked_fill_(hidden[low:high] & (bias[:, number:] == 0), LOW)
            dropped = None
            if generator is not None:
                dropped = _dropped(group.stop - head, stop - first, number + high - low, dropout, generator)
            yield _Tile(group, slice(first, stop), slice(low, high), bias, dropped)


def _bias(
    rows: int, low: int, high: int, window: Window, number: int, gains: Tensor | None, like: Tensor
) -> Tensor | None:
    """What is added to the scores of ``number`` global keys and of keys ``low`` to ``high`` from the first query on."""
    if window.by_tile and gains is None:
        return None
    bias = like.new_zeros(rows, number + high - low)
    if gains is not None:
        bias[:, :number] = gains
    if not window.by_tile:
        distance = torch.arange(low, high) - torch.arange(rows)[:, None]
        bias[:, number:].masked_fill_(distance.abs() > window.reach, float("-inf"))
    return bias


def _dropped(heads: int, rows: int, keys: int, rate: float, generator: torch.Generator) -> Tensor:
    """Which weights are dropped, by 16 random bits each: four times as fast as a random float for each."""
    number = heads * rows * keys
    bits = torch.empty(-(-number // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return (bits.view(torch.int16)[:number] >= _kept(rate) - HIGHEST // 2).view(heads, rows, keys)


def _kept(rate: float) -> int:
    """How many of the 2^16 numbers of 16 bits keep a weight."""
    return min(max(round((1.0 - rate) * HIGHEST), 1), HIGHEST - 1)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, columns: Tensor | None, gains: Tensor | None,
    *, window: Window, scale: float, dropout: float, seed: int,
) -> Tensor:  # fmt: skip
    """The same in operations that autograd follows, for gradients that are differentiated again."""
    groups: dict[int, list[Tensor]] = {}
    for tile in _tiles(q, hidden, columns, gains, window, dropout, seed):
        keys, values = (x[tile.heads, tile.keys] for x in (k, v))
        if columns is not None:
            keys, values = (
                torch.cat((x[tile.heads].index_select(1, columns), y), 1) for x, y in ((k, keys), (v, values))
            )
        scores = q[tile.heads, tile.rows] @ keys.mT * scale
        weights = torch.softmax(scores if tile.bias is None else scores + tile.bias, -1)
        if tile.dropped is not None:
            weights = weights.masked_fill(tile.dropped, 0.0) * (HIGHEST / _kept(dropout))
        groups.setdefault(tile.heads.start, []).append(weights @ values)
    return torch.cat([torch.cat(parts, 1) for parts in groups.values()])


class _Keys:
    """Keys or values, read as global ones beside a slice, and the place for their gradients."""

    def __init__(self, name: str, x: Tensor, columns: Tensor | None, work: Workspace) -> None:
        self.name, self.x, self.columns, self.work = name, x, columns, work
        self.chosen = None if columns is None else x.index_select(1, columns)
        self.number = 0 if columns is None else len(columns)

    def read(self, tile: _Tile) -> Tensor:
        near = self.x[tile.heads, tile.keys]
        if self.chosen is None:
            return near
        out = self.work(self.name, near.shape[0], self.number + near.shape[1], near.shape[2])
        return torch.cat((self.chosen[tile.heads], near), 1, out=out)

    def collecting(self) -> None:
        """Make room for gradients, laid out as the results are."""
        self.gradient = _empty(self.x).zero_()
        self.of_chosen = None if self.chosen is None else torch.zeros_like(self.chosen)

    def add(self, tile: _Tile, gradient: Tensor) -> None:
        self.gradient[tile.heads, tile.keys].add_(gradient[:, self.number :])
        if self.of_chosen is not None:
            self.of_chosen[tile.heads].add_(gradient[:, : self.number])

    def collected(self) -> Tensor:
        if self.columns is not None and self.of_chosen is not None:
            self.gradient.index_add_(1, self.columns, self.of_chosen)
        return self.gradient


def _empty(x: Tensor) -> Tensor:
    """Uninitialised memory of (heads, length, width), laid out as (length, heads, width)."""
    return x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, columns: Tensor | None, gains: Tensor | None,
    *, keep: bool, window: Window, scale: float, dropout: float, seed: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    out, work = _empty(q), Workspace(q)
    keys, values = _Keys("k", k, columns, work), _Keys("v", v, columns, work)
    for tile in _tiles(q, hidden, columns, gains, window, dropout, seed):
        rows = out[tile.heads, tile.rows]
        weights = tiled.weights(q[tile.heads, tile.rows], keys.read(tile), tile.bias, None, scale=scale, work=work)
        factor = 1.0
        if tile.dropped is not None:
            weights.masked_fill_(tile.dropped, 0.0)
            factor = HIGHEST / _kept(dropout)
        written = work("out", *rows.shape)
        rows.copy_(torch.baddbmm(written, weights, values.read(tile), beta=0, alpha=factor, out=written))
    return out, ()


def _backward(
    inputs: tuple[Any, ...], outputs: Tensors, kept: Tensors, gradient: tuple[Tensor, ...],
    *, window: Window, scale: float, dropout: float, seed: int,
) -> Tensors:  # fmt: skip
    q, k, v, hidden, columns, gains = inputs
    dq, work = _empty(q), Workspace(q)
    keys, values = _Keys("k", k, columns, work), _Keys("v", v, columns, work)
    keys.collecting()
    values.collecting()
    factor = HIGHEST / _kept(dropout) if dropout else 1.0
    for tile in _tiles(q, hidden, columns, gains, window, dropout, seed):
        queries, grad = q[tile.heads, tile.rows], gradient[0][tile.heads, tile.rows]
        near_keys, near_values = keys.read(tile), values.read(tile)
        weights = tiled.weights(queries, near_keys, tile.bias, None, scale=scale, work=work)
        used = weights
        if tile.dropped is not None:
            used = work("used", *weights.shape).copy_(weights).masked_fill_(tile.dropped, 0.0)
        d_values = work("dv", *near_values.shape)
        values.add(tile, torch.baddbmm(d_values, used.mT, grad, beta=0, alpha=factor, out=d_values))
        d_scores = work("ds", *weights.shape)
        torch.baddbmm(d_scores, grad, near_values.mT, beta=0, alpha=factor, out=d_scores)
        if tile.dropped is not None:
            d_scores.masked_fill_(tile.dropped, 0.0)
        torch.ops.aten._softmax_backward_data.out(d_scores, weights, -1, weights.dtype, grad_input=d_scores)
        rows, d_keys = work("dq", *queries.shape), work("dk", *near_keys.shape)
        dq[tile.heads, tile.rows] = torch.baddbmm(rows, d_scores, near_keys, beta=0, alpha=scale, out=rows)
        keys.add(tile, torch.baddbmm(d_keys, d_scores.mT, queries, beta=0, alpha=scale, out=d_keys))
    return dq, keys.collected(), values.collected(), None, None, None


_attend = in_float32(CustomGradient(_plain, _forward, _backward))
