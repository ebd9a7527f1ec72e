"""Softmax over the keys near a query and a few global ones, under one normaliser, in tiles.

This is the pattern of Longformer and LED: a query sees a window of keys, and keys that every query sees. BigBird adds
blocks that are drawn at random for each block of queries. A tile puts all these keys beside one another.
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
    masked: Bool[Tensor, "length"] | None = None,
    columns: Int[Tensor, "number"] | None = None,
    gains: Float[Tensor, "number"] | None = None,
    blocks: Int[Tensor, "heads tiles choices"] | None = None,
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
        masked: Keys that no query sees: padding.
        columns: Positions of the keys that every query sees, and sees once, also where a window holds them.
        gains: What the scores of ``columns`` gain.
        blocks: Numbers of the blocks of ``window.rows`` keys that a tile sees besides, again where it sees them anyway.
        dropout: The share of weights that are set to zero.
    """
    settings: Any = {"window": window, "scale": scale, "dropout": dropout}
    settings["seed"] = int(torch.randint(2**62, ())) if dropout else 0
    return _attend(q, k, v, masked, columns, gains, blocks, **settings)


class _Tile(NamedTuple):
    """Some heads' queries, their slice and blocks of keys, what is added to scores, and which weights are dropped."""

    heads: slice
    rows: slice
    keys: slice
    blocks: Int[Tensor, "heads choices"] | None
    bias: Float[Tensor, "*#heads rows keys"] | None
    dropped: Bool[Tensor, "heads rows keys"] | None


def _tiles(
    q: Tensor, masked: Tensor | None, columns: Tensor | None, gains: Tensor | None, blocks: Tensor | None,
    window: Window, dropout: float, seed: int,
) -> Iterator[_Tile]:  # fmt: skip
    """Every tile, in the same order and with the same random numbers in every pass."""
    heads, length = q.shape[:2]
    number, choices = 0 if columns is None else len(columns), 0 if blocks is None else blocks.shape[-1]
    apart = number + choices * window.rows
    together = tiled.heads_together(min(window.rows, length) * (min(window.rows + 2 * window.reach, length) + apart))
    generator = torch.Generator().manual_seed(seed) if dropout else None
    hidden, gains = _hidden(masked, columns, gains, q)
    biases: dict[tuple[int, int, int], Tensor | None] = {}
    for head in range(0, heads, together):
        group = slice(head, min(head + together, heads))
        for index, first in enumerate(range(0, length, window.rows)):
            stop = min(first + window.rows, length)
            low, high = max(first - window.reach, 0), min(stop + window.reach, length)
            place, keys = (stop - first, low - first, high - first), apart + high - low
            if place not in biases:
                biases[place] = _bias(*place, window, number, apart - number, gains, q)
            bias = biases[place]
            if hidden is not None and hidden[low:high].any():
                bias = q.new_zeros(stop - first, keys) if bias is None else bias.clone()
                near = bias[:, number : number + high - low]
                near.masked_fill_(hidden[low:high] & (near == 0), LOW)
            chosen = None if blocks is None else blocks[group, index]
            if chosen is not None and masked is not None:
                padding = masked.unflatten(0, (-1, window.rows))[chosen].flatten(1)
                bias = q.new_zeros(stop - first, keys) if bias is None else bias
                bias = bias.repeat(len(chosen), 1, 1)
                bias[..., keys - padding.shape[1] :].masked_fill_(padding[:, None], LOW)
            dropped = None
            if generator is not None:
                dropped = _dropped(group.stop - head, stop - first, keys, dropout, generator)
            yield _Tile(group, slice(first, stop), slice(low, high), chosen, bias, dropped)


def _hidden(
    masked: Tensor | None, columns: Tensor | None, gains: Tensor | None, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Which keys no window shows, padding and global keys, and what the scores of global keys gain."""
    if columns is None:
        return masked, None
    hidden = torch.zeros(like.shape[1], dtype=torch.bool) if masked is None else masked.clone()
    hidden[columns] = True
    if masked is not None and masked[columns].any():
        gains = like.new_zeros(len(columns)) if gains is None else gains
        gains = gains.masked_fill(masked[columns], LOW)
    return hidden, gains


def _bias(
    rows: int, low: int, high: int, window: Window, number: int, others: int, gains: Tensor | None, like: Tensor
) -> Tensor | None:
    """What is added to scores of ``number`` global keys, keys ``low`` to ``high`` from the first query on, others."""
    if window.by_tile and gains is None:
        return None
    bias = like.new_zeros(rows, number + high - low + others)
    if gains is not None:
        bias[:, :number] = gains
    if not window.by_tile:
        distance = torch.arange(low, high) - torch.arange(rows)[:, None]
        bias[:, number : number + high - low].masked_fill_(distance.abs() > window.reach, float("-inf"))
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
    q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None, columns: Tensor | None, gains: Tensor | None,
    blocks: Tensor | None, *, window: Window, scale: float, dropout: float, seed: int,
) -> Tensor:  # fmt: skip
    """The same in operations that autograd follows, for gradients that are differentiated again."""
    groups: dict[int, list[Tensor]] = {}
    for tile in _tiles(q, masked, columns, gains, blocks, window, dropout, seed):
        keys, values = (torch.cat(list(_parts(x, columns, tile, window)), 1) for x in (k, v))
        scores = q[tile.heads, tile.rows] @ keys.mT * scale
        weights = torch.softmax(scores if tile.bias is None else scores + tile.bias, -1)
        if tile.dropped is not None:
            weights = weights.masked_fill(tile.dropped, 0.0) * (HIGHEST / _kept(dropout))
        groups.setdefault(tile.heads.start, []).append(weights @ values)
    return torch.cat([torch.cat(parts, 1) for parts in groups.values()])


def _parts(x: Tensor, columns: Tensor | None, tile: _Tile, window: Window) -> Iterator[Tensor]:
    """The global keys, the slice, and the blocks of a tile."""
    if columns is not None:
        yield x[tile.heads].index_select(1, columns)
    yield x[tile.heads, tile.keys]
    if tile.blocks is not None:
        heads = torch.arange(len(tile.blocks))[:, None]
        yield x[tile.heads].unflatten(1, (-1, window.rows))[heads, tile.blocks].flatten(1, 2)


class _Keys:
    """Keys or values, read as global ones beside a slice, and the place for their gradients."""

    def __init__(
        self, name: str, x: Tensor, columns: Tensor | None, blocks: Tensor | None, rows: int, work: Workspace
    ) -> None:
        self.name, self.x, self.columns, self.rows, self.work = name, x, columns, rows, work
        self.chosen = None if columns is None else x.index_select(1, columns)
        self.number = 0 if columns is None else len(columns)
        self.blocks = None if blocks is None else x.reshape(-1, rows * x.shape[2])

    def read(self, tile: _Tile) -> Tensor:
        near = self.x[tile.heads, tile.keys]
        if self.chosen is None and self.blocks is None:
            return near
        parts = [near] if self.chosen is None else [self.chosen[tile.heads], near]
        if self.blocks is not None and tile.blocks is not None:
            blocks = self.work("blocks", tile.blocks.numel(), self.blocks.shape[1])
            torch.index_select(self.blocks, 0, self._index(tile.blocks, tile.heads), out=blocks)
            parts.append(blocks.view(near.shape[0], -1, near.shape[2]))
        size = sum(part.shape[1] for part in parts)
        return torch.cat(parts, 1, out=self.work(self.name, near.shape[0], size, near.shape[2]))

    def _index(self, blocks: Tensor, heads: slice) -> Tensor:
        """The numbers of some heads' blocks among those of all heads."""
        number = self.x.shape[1] // self.rows
        return (blocks + number * torch.arange(heads.start, heads.stop)[:, None]).flatten()

    def collecting(self) -> None:
        """Make room for gradients, laid out as the results are."""
        self.gradient = _empty(self.x).zero_()
        self.of_chosen = None if self.chosen is None else torch.zeros_like(self.chosen)
        self.of_blocks = None if self.blocks is None else torch.zeros_like(self.blocks)

    def add(self, tile: _Tile, gradient: Tensor) -> None:
        near = self.gradient[tile.heads, tile.keys]
        stop = self.number + near.shape[1]
        near.add_(gradient[:, self.number : stop])
        if self.of_chosen is not None:
            self.of_chosen[tile.heads].add_(gradient[:, : self.number])
        if self.of_blocks is not None and tile.blocks is not None:
            index, rows = self._index(tile.blocks, tile.heads), gradient[:, stop:]
            self.of_blocks.index_add_(0, index, rows.reshape(-1, self.of_blocks.shape[1]))

    def collected(self) -> Tensor:
        if self.columns is not None and self.of_chosen is not None:
            self.gradient.index_add_(1, self.columns, self.of_chosen)
        if self.of_blocks is not None:
            self.gradient.add_(self.of_blocks.view(self.x.shape))
        return self.gradient


def _empty(x: Tensor) -> Tensor:
    """Uninitialised memory of (heads, length, width), laid out as (length, heads, width)."""
    return x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None, columns: Tensor | None, gains: Tensor | None,
    blocks: Tensor | None, *, keep: bool, window: Window, scale: float, dropout: float, seed: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    out, work = _empty(q), Workspace(q)
    keys, values = (_Keys(name, x, columns, blocks, window.rows, work) for name, x in (("k", k), ("v", v)))
    for tile in _tiles(q, masked, columns, gains, blocks, window, dropout, seed):
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
    q, k, v, masked, columns, gains, blocks = inputs
    dq, work = _empty(q), Workspace(q)
    keys, values = (_Keys(name, x, columns, blocks, window.rows, work) for name, x in (("k", k), ("v", v)))
    keys.collecting()
    values.collecting()
    factor = HIGHEST / _kept(dropout) if dropout else 1.0
    for tile in _tiles(q, masked, columns, gains, blocks, window, dropout, seed):
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
    return dq, keys.collected(), values.collected(), None, None, None, None


_attend = in_float32(CustomGradient(_plain, _forward, _backward))
