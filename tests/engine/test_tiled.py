"""Tiles against the dense masked softmax: any tiling, heads in groups, key masks, gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import tiled
from fast_attention.engine.tiled import Blocks, Span, Tile, Tiling

LENGTH, ROWS = 20, 4


def windows(dense: Tensor) -> Tiling:
    """Two heads at a time: every tile sees the keys from three before its first query to its last."""

    def tiles(group: slice) -> Iterator[Tile]:
        for first in range(0, LENGTH, ROWS):
            low = max(first - 3, 0)
            visible = torch.ones(ROWS, first + ROWS - low, dtype=torch.bool).tril(first - low)
            dense[group, first : first + ROWS, low : first + ROWS] = visible
            yield Tile.of(Span(first, ROWS), Span(low, first + ROWS - low), visible, torch.float64)

    return Tiling(2, tiles)


def chunks(dense: Tensor) -> Tiling:
    """One head at a time, two chunks of queries in every tile; the last two queries of a chunk see nothing."""

    def tiles(head: slice) -> Iterator[Tile]:
        for first in (0, 5):
            visible = torch.rand(5, 7) > 0.3
            visible[3:] = False
            for start in (first, first + 10):
                dense[head, start : start + 5, start : start + 7][..., : LENGTH - start] = visible[:, : LENGTH - start]
            if first == 5:  # the second chunk ends with the sequence
                for start in (5, 15):
                    size = min(7, LENGTH - start)
                    yield Tile.of(Span(start, 5), Span(start, size), visible[:, :size], torch.float64)
            else:
                yield Tile.of(Span(first, 5, 2, 10), Span(first, 7, 2, 10), visible, torch.float64)

    return Tiling(1, tiles)


def blocks(dense: Tensor) -> Tiling:
    """Blocks of three keys, the last of them cut short, other ones for every head."""

    def tiles(group: slice) -> Iterator[Tile]:
        heads = range(dense.shape[0])[group]
        for first in range(0, LENGTH, ROWS):
            table = torch.stack([torch.randperm(7)[:2] for _ in heads])
            positions = (table[..., None] * 3 + torch.arange(3)).flatten(1)
            for head, row in zip(heads, positions, strict=True):
                dense[head, first : first + ROWS, row[row < LENGTH]] = True
            index = (table + 7 * torch.arange(len(heads))[:, None]).flatten()
            yield Tile(Span(first, ROWS), Blocks(index, 3), masked=(positions >= LENGTH)[:, None])

    return Tiling(2, tiles, 3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tiling_of", [windows, chunks, blocks])
def test_tiles_are_the_dense_softmax(tiling_of: object, masked: bool) -> None:
    torch.manual_seed(1)
    q, k, v, grad_out = (torch.randn(5, LENGTH, width, dtype=torch.float64) for width in (6, 6, 3, 3))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    key_mask = torch.rand(5, LENGTH) > 0.3 if masked else None
    start = torch.randn_like(k), torch.randn_like(v)
    dense = torch.zeros(5, LENGTH, LENGTH, dtype=torch.bool)
    assert callable(tiling_of)
    with torch.no_grad():
        drawn = torch.get_rng_state()
        ours = tiled.attend(q, k, v, key_mask, tiling_of(dense), scale=0.5)
        torch.set_rng_state(drawn)
        again = tuple(x.clone() for x in start)
        dq, dk, dv = tiled.gradients(q, k, v, key_mask, grad_out, tiling_of(dense), scale=0.5, start=again)
        torch.set_rng_state(drawn)
        alone = tiled.gradients(q, k, v, key_mask, grad_out, tiling_of(dense), scale=0.5)
    assert bool(dense.any(-1).any(-1).all())  # every head was asked for
    mask = dense if key_mask is None else dense & key_mask[:, None]
    theirs = F.scaled_dot_product_attention(q, k, v, mask, scale=0.5)
    expected = torch.autograd.grad(theirs, (q, k, v), grad_out)
    pairs = [(ours, theirs), (dq, expected[0]), (dk - start[0], expected[1]), (dv - start[1], expected[2])]
    for a, b in [*pairs, *zip(alone, expected, strict=True)]:
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
