"""Softmax over sliding windows of a grid, row by row, by torch's fused kernel: queries are read where they stand.

A query's keys are some columns of the rows around its own. In a stripe of keys, where such rows lie one behind another,
those of neighbouring queries are overlapping views: nothing but the columns of keys is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import tiled
from fast_attention.engine.tiling import bias_of
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.sparse.grid import Axis
from fast_attention.mechanisms.sparse.stripes import TOGETHER, Columns, Stripes, columns, ordered

TILE = 16  # columns of queries that read the same columns of keys

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Run(NamedTuple):
    """Rows of queries and what they see: ``window`` rows of keys, from ``first`` on or, if it ``moves``, each one row
    further on than the one before.
    """

    places: slice  # in the grid
    first: int  # in a stripe
    number: int
    moves: bool

    def keys(self, x: Float[Tensor, "heads tokens E"], span: int, window: int) -> Float[Tensor, "heads rows keys E"]:
        """The keys of every row, a view of a stripe with ``span`` tokens to a row."""
        rows = self.number if self.moves else 1
        some = x[:, self.first * span : (self.first + rows - 1 + window) * span]
        return some.unfold(1, window * span, span).mT.expand(-1, self.number, -1, -1)


def runs(axis: Axis, length: int) -> Iterator[tuple[int, list[Run]]]:
    """The rows of a grid that see each other, by their window: it stands still at both ends and moves between them."""
    for places, among in ordered(length, axis.dilation):
        number = among.stop - among.start
        window = min(axis.window, number)
        before, last = window // 2, number - window
        ends = (0, 0, before, False), (before, 0, last + 1, True), (before + last + 1, last, window - before - 1, False)
        step, start = axis.dilation, places.start
        yield (
            window,
            [
                Run(slice(start + row * step, start + (row + rows) * step, step), among.start + first, rows, moves)
                for row, first, rows, moves in ends
                if rows
            ],
        )


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys width"],
    *,
    width: int,
    down: Axis,
    across: Axis,
    scale: float,
) -> Float[Tensor, "*batch length width"]:
    """Outputs of the queries of a grid over its keys, the leading tokens first."""
    out, work, leading = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        Workspace(q),
        k.shape[-2] - q.shape[-2],
    )
    queries, k, v = (tiled.flatten(x) for x in (q, k, v))
    grids = [x.view(len(queries), -1, width, x.shape[-1]) for x in (queries, out)]
    height = grids[0].shape[1]
    parts, moves = [*runs(down, height)], ordered(height, down.dilation)
    for stripe in columns(across._replace(tile=TILE), width):
        span = leading + stripe.visible.shape[-1]
        places, to = stripe.keys
        keys = Stripes(width, span, moves, [(places, slice(leading + to.start, leading + to.stop))], leading)
        biases = [_bias(stripe, window, leading, q.dtype) for window, _ in parts]
        for first in range(0, len(queries), TOGETHER):
            group = slice(first, first + TOGETHER)
            held = [keys.gather(x[group], leading, partial(work, name)) for x, name in ((k, "k"), (v, "v"))]
            q_grid, out_grid = (x[group, :, stripe.queries[0]] for x in grids)
            for bias, (window, some) in zip(biases, parts, strict=True):
                for run in some:
                    near = (run.keys(x, span, window) for x in held)
                    rows = run.places
                    out_grid[:, rows] = _kernel(q_grid[:, rows], *near, 0.0, False, attn_mask=bias, scale=scale)[0]
    return out


def _bias(stripe: Columns, window: int, leading: int, dtype: torch.dtype) -> Tensor | None:
    """What a stripe's queries do not see of their rows of keys: leading tokens stand in every row, and count once."""
    inside = stripe.queries[1]
    near = F.pad(stripe.visible[inside, None].expand(-1, window, -1), (leading, 0))
    near[:, 0, :leading] = True
    return bias_of(near.flatten(1), dtype)
