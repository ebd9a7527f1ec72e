"""Draws attention maps: every head before and after, and how far apart they are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import matplotlib.lines
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fast_attention.lab import hover
from fast_attention.lab.drawing import (
    COLOURS,
    INK,
    ON_DARK,
    ON_LIGHT,
    PALE,
    attention_map,
    figure_grid,
    folded,
    picture,
)
from fast_attention.lab.maps.heads import Head, blocks
from fast_attention.lab.numbers import exactly

PER_BAND = 6  # heads side by side
DASHES = (0, (2.5, 1.2))  # of what runs after


@picture
def layer(heads: list[Head], length: int, chosen: list[int], names: tuple[str, str]) -> tuple[Figure, str]:
    """A column for every head: its map before, its map after, and the chosen rows of both.

    Args:
        heads: Of one layer.
        length: Tokens.
        chosen: The queries whose rows are drawn as curves.
        names: What runs before and after.
    """
    bands = math.ceil(len(heads) / PER_BAND)
    columns = min(PER_BAND, len(heads))
    distances = ", ".join(f"head {head.head} {head.distance:.2f}" for head in heads)
    alt = f"{heads[0].layer}: attention maps of {names[0]} above {names[1]}; distance of {distances}"
    ratios = [1.0, 1.0, 0.75] * bands
    figure, grid = figure_grid(5.9 * bands, 3 * bands, columns, width=1.1 + 1.9 * columns, height_ratios=ratios)
    for number in range(bands * columns):
        band, column = divmod(number, columns)
        panels = grid[3 * band * columns + column :: columns][:3]
        if number < len(heads):
            _head(panels, heads[number], length, chosen, names if column == 0 else ("", ""))
        else:
            for axes in panels:
                axes.set_visible(False)
    if chosen:
        lines, texts = _legend(chosen, names)
        figure.legend(lines, texts, loc="outside lower center", ncols=len(lines), fontsize=8)
    return figure, alt


def _head(panels: list[Axes], head: Head, length: int, chosen: list[int], names: tuple[str, str]) -> None:
    top = float(np.quantile(head.original, 0.995))
    for axes, table, name in zip(panels, (head.original, head.swapped), names, strict=False):
        attention_map(axes, table, top, aspect="auto", extent=(-0.5, length - 0.5, length - 0.5, -0.5))
        axes.set_yticks([0, length - 1] if name else [])
        axes.set_ylabel(f"{folded(name, 18)}\nquery" if name else "", fontsize=8)
        axes.spines[:].set_visible(False)
    named = f"head {head.head}, {head.distance:.4f} apart"
    for axes, table, when in zip(panels, (head.original, head.swapped), ("before", "after"), strict=False):
        hover.panel(axes, f"{named}: {when}, the largest weight on a block of keys is {exactly(float(np.max(table)))}")
    panels[0].set_title(f"head {head.head}: {head.distance:.2f} apart", fontsize=8.5)
    _curves(panels[2], head, length, chosen, bool(names[0]))


def _curves(axes: Axes, head: Head, length: int, chosen: list[int], first: bool) -> None:
    count = len(head.original[0])
    centres = (np.arange(count) + 0.5) * length / count
    curves = zip(itertools.cycle(COLOURS), chosen, head.original_curves, head.swapped_curves, strict=False)
    for colour, query, before, after in curves:
        axes.plot(centres, before, color=colour, linewidth=1.1)
        axes.plot(centres, after, color=colour, linewidth=0.9, linestyle=DASHES)
        for curve, when in ((before, "before"), (after, "after")):
            hover.curve(axes, centres, curve, f"query {query:,} {when}: {peak(curve, length)}")
    axes.set_xlim(0, length)
    axes.set_xticks([0, length // 2, length])
    axes.set_yscale("function", functions=(_root, _square))
    highest = max(1e-3, float(np.max([head.original_curves, head.swapped_curves], initial=0.0)))
    lowest = min(0.0, float(np.min([head.original_curves, head.swapped_curves], initial=0.0)))
    axes.set_ylim(lowest, highest * 1.05)
    axes.set_yticks([0.0, highest], labels=["0", f"{highest:.2g}"])
    axes.tick_params(labelsize=7)
    axes.set_xlabel("key", fontsize=8)
    axes.set_ylabel("weight" if first else "", fontsize=8)
    axes.grid()


def peak(curve: list[float], length: int) -> str:
    """The largest weight of a row, and the block of keys that it lies on."""
    at, edges = int(np.argmax(curve)), blocks(length, len(curve))
    last = edges[at + 1] - 1
    keys = f"key {edges[at]:,}" if last == edges[at] else f"keys {edges[at]:,} to {last:,}"
    return f"{exactly(curve[at])} on {keys}"


def _root(x: Any) -> Any:
    return np.sign(x) * np.sqrt(np.abs(x))


def _square(x: Any) -> Any:
    return np.sign(x) * np.square(x)


def _legend(chosen: list[int], names: tuple[str, str]) -> tuple[list[Any], list[str]]:
    """A legend: colours for the queries, strokes for the two models."""
    line = matplotlib.lines.Line2D
    strokes = [line([], [], color=colour) for colour, _ in zip(itertools.cycle(COLOURS), chosen, strict=False)]
    texts = [f"query {query:,}" for query in chosen]
    strokes += [line([], [], color=INK), line([], [], color=INK, linestyle=DASHES)]
    return strokes, [*texts, names[0], names[1]]


@picture
def overview(layers: list[list[Head]]) -> tuple[Figure, str]:
    """Every head's distance: a row for each layer, a column for each head; above in the model, below by itself."""
    tables = [[[h.distance for h in heads] for heads in layers], [[h.own_distance for h in heads] for heads in layers]]
    titles = ("in the swapped model", "on the original's queries and keys")
    alt = "Distance of every head: " + "; ".join(
        f"layer {number} {', '.join(f'{h.distance:.2f}' for h in heads)}" for number, heads in enumerate(layers)
    )
    most = max(len(heads) for heads in layers)
    figure, panels = figure_grid(1.0 + 0.3 * len(layers), 1, 2, sharey=True)
    image = None
    for axes, table, title in zip(panels, tables, titles, strict=True):
        full = np.full((len(layers), most), np.nan)
        for number, row in enumerate(table):
            full[number, : len(row)] = row
        image = axes.imshow(full, cmap="viridis_r", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_title(title)
        axes.set_xlabel("head")
        axes.set_xticks(range(most))
        axes.set_yticks(range(len(layers)), [heads[0].layer for heads in layers])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        hover.cells(
            axes, full, lambda y, x, t=table, l=title: f"{layers[y][x].layer} head {x}, {l}: {exactly(t[y][x])}"
        )
        for (y, x), value in np.ndenumerate(full):
            if np.isfinite(value):
                ink = ON_DARK if value > 0.42 else ON_LIGHT
                axes.text(x, y, f"{value:.2f}".lstrip("0") or "0", ha="center", va="center", fontsize=7, color=ink)
    assert image is not None
    bar = figure.colorbar(image, ax=panels, pad=0.01, aspect=20)
    bar.set_label("distance")
    bar.outline.set_edgecolor(PALE)  # type: ignore[operator]
    return figure, alt
