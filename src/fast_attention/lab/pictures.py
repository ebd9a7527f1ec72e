"""Draws a comparison: growth with length, errors per head, attention matrices, error against speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import matplotlib.colors
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fast_attention.lab import hover
from fast_attention.lab.comparison import Comparison, Error, Matrices
from fast_attention.lab.drawing import (
    COLOURS,
    GOOD,
    INK,
    PALE,
    PAPER,
    SOFT,
    WIN,
    against_length,
    attention_map,
    figure_grid,
    folded,
    labelled,
    line,
    logarithmic,
    panels,
    picture,
)
from fast_attention.lab.hover import Series
from fast_attention.lab.numbers import exactly, factor, percent
from fast_attention.lab.records import EXACT, Cell, Pass
from fast_attention.lab.tradeoff import FLOOR, TOP, Point, Tradeoff
from fast_attention.lab.verdicts import crossing

Quantity = Callable[[Cell], float | None]
Crossed = Pass | None


@picture
def growth(record: Comparison, quantity: Quantity, unit: str, alt: str, crossed: Crossed = None) -> tuple[Figure, str]:
    """A panel per kind of mechanism: a quantity against length, log-log, beside exact attention's.

    Args:
        record: What was measured.
        quantity: The number of a cell, or None.
        unit: The label of the vertical axis.
        alt: What the picture shows.
        crossed: The pass whose crossovers are marked.
    """
    families: dict[str, list[str]] = {}
    for name in record.mechanisms:
        families.setdefault(name.split("(")[0], []).append(name)
    shown = {family: names for family, names in families.items() if any(_points(record, n, quantity) for n in names)}
    figure, grid = panels(len(shown), 2.15, 5, across="tokens", up=unit, sharex=True, sharey=True)
    for axes, (family, names) in zip(grid, shown.items(), strict=False):
        _panel(axes, record, family, names, (quantity, unit), crossed)
    for axes in grid[-5:]:
        axes.tick_params(labelbottom=True)
    return figure, alt


def _points(record: Comparison, name: str, quantity: Quantity) -> dict[int, float]:
    values = {cell.length: quantity(cell) for cell in record.cells if cell.mechanism == name}
    return {length: value for length, value in sorted(values.items()) if value}


def _panel(
    axes: Axes, record: Comparison, family: str, names: list[str], shown: tuple[Quantity, str], crossed: Crossed
) -> None:
    quantity, unit = shown

    def says(name: str) -> Series:
        return Series(name, up=lambda value: f"{exactly(value)} {unit}")

    exact = _points(record, EXACT, quantity)
    ticks = [cell.length for cell in record.cells if cell.mechanism == EXACT]
    against_length(axes, ticks, family)
    label = "exact" if len(names) > 1 else None
    line(axes, exact, says=says(EXACT), color=INK, linewidth=1.6, marker="", label=label)
    for colour, name in zip(itertools.cycle(COLOURS), names, strict=False):
        points = _points(record, name, quantity)
        line(axes, points, says=says(name), color=colour, linewidth=1.6, label=name[len(family) + 1 : -1] or "default")
        both = [length for length in points if length in exact]
        if both and name == names[0]:
            values, baseline = ([curve[length] for length in both] for curve in (points, exact))
            better = [a < b for a, b in zip(values, baseline, strict=True)]
            axes.fill_between(both, values, baseline, where=better, color=WIN, interpolate=True, linewidth=0)
        where = crossing(record, name, crossed) if crossed else None
        if where is not None:
            axes.axvline(where, color=colour, linewidth=0.8, linestyle=":")
            label = f"{where:,.0f}" if where > min(points) else f"≤ {where:,.0f}"
            late = math.log(where / min(points)) > 0.7 * math.log(max(ticks) / min(ticks))
            axes.annotate(label, (where, 0.98), xycoords=("data", "axes fraction"), va="top", fontsize=7,
                          color=colour, ha="right" if late else "left")  # fmt: skip
    if len(names) > 1:
        axes.legend(fontsize=6, loc="lower right", handlelength=1.2, labelspacing=0.2)


@picture
def head_errors(errors: list[Error], layers: list[str]) -> tuple[Figure, str]:
    """Output error of every approximation (a row) in every head of every layer (columns), on a logarithmic scale."""
    heads = [len(row) for row in errors[0].output]
    edges = list(itertools.accumulate(heads, initial=0))
    table = np.array([[value for row in error.output for value in row] for error in errors], dtype=float)
    names = [f"{layer} head {head}" for layer, count in zip(layers, heads, strict=True) for head in range(count)]
    figure, (axes,) = figure_grid(1.3 + 0.24 * len(errors))
    norm = matplotlib.colors.LogNorm(1e-2, 3.0)
    shown = np.clip(np.nan_to_num(table, nan=np.inf), 1e-3, 10.0)
    image = axes.imshow(shown, aspect="auto", cmap="YlOrRd", norm=norm, interpolation="nearest")
    hover.cells(axes, table, lambda y, x: f"{errors[y].mechanism}, {names[x]}: {exactly(100 * table[y, x])} %")
    axes.set_yticks(range(len(errors)), [error.mechanism for error in errors])
    centres = [(before + after - 1) / 2 for before, after in itertools.pairwise(edges)]
    axes.set_xticks(centres, [f"{layer}\n({count} heads)" for layer, count in zip(layers, heads, strict=True)])
    for edge in edges[1:-1]:
        axes.axvline(edge - 0.5, color=PAPER, linewidth=2)
    right = axes.secondary_yaxis("right")
    summaries = [error.summary() for error in errors]
    words = [f"{percent(each[0])} / {percent(each[1])}" if each else "" for each in summaries]
    right.set_yticks(range(len(errors)), words)
    for side in (axes, right):
        side.tick_params(length=0)
        side.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, extend="both", pad=0.01, aspect=30, shrink=0.9)
    bar.set_ticks([0.01, 0.03, 0.1, 0.3, 1.0, 3.0], labels=["1 %", "3 %", "10 %", "30 %", "100 %", "300 %"])
    bar.outline.set_visible(False)  # type: ignore[operator]
    known = [(error.mechanism, *each) for error, each in zip(errors, summaries, strict=True) if each]
    return figure, "Relative output error of every approximation in every head: " + "; ".join(
        f"{name} median {percent(median)}, worst {percent(worst)}" for name, median, worst in known
    )


@picture
def matrices(held: Matrices) -> tuple[Figure, str]:
    """Exact attention's matrix of one head beside each approximation's, on one colour scale (square root)."""
    exact, shown = held.exact, {EXACT: held.exact, **held.approximate}
    top = float(exact.flatten().quantile(0.999)) if exact.numel() < 2**24 else float(exact.max())
    figure, grid = panels(len(shown), 2.75, 5, margin=0.0)
    for axes, (name, matrix) in zip(grid, shown.items(), strict=False):
        attention_map(axes, matrix, top)
        hover.panel(axes, f"{name}: largest weight {exactly(float(matrix.max()))}")
        weight = "bold" if name == EXACT else "normal"
        axes.set_title(folded(name, 30), fontsize=8, fontweight=weight, loc="center")
    return figure, f"Attention matrices of {held.where}: exact attention, then {', '.join(held.approximate)}"


@picture
def scatter(tradeoff: Tradeoff, allowed: float | None = None) -> tuple[Figure, str]:
    """Speed to the right, error downwards to nothing, a line through the Pareto front, another at what is allowed."""
    best, points = tradeoff.best, tradeoff.points
    figure, (axes,) = figure_grid(4.6, width=7.6)
    logarithmic(axes)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    if allowed is not None:
        axes.axhline(min(max(allowed, FLOOR), TOP), color=COLOURS[1], linewidth=0.9, linestyle=":")
    axes.step([p.speed for p in best], list(map(_height, best)), where="pre", color=GOOD, linewidth=1.4, zorder=1)
    for point in points:
        colour = INK if point.name == EXACT else GOOD if point in best else PALE
        axes.plot(point.speed, _height(point), "o", color=colour, markersize=6, zorder=2)
        says = f"{point.name}: {exactly(point.speed)} times the speed, median error {exactly(100 * point.error)} %"
        hover.point(axes, point.speed, _height(point), says)
    axes.set_ylim(FLOOR / 1.5, TOP * 1.5)
    words = ["0.1 % or less", "0.3 %", "1 %", "3 %", "10 %", "30 %", "100 %", "300 % or more"]
    axes.set_yticks([FLOOR, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, TOP], words, fontsize=9)
    speeds = [point.speed for point in points]
    ticks = [x * 10.0**power for power in (-2, -1, 0, 1, 2) for x in (1, 2, 5)]
    ticks = [tick for tick in ticks if min(speeds) / 2 < tick < 2 * max(speeds)]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], fontsize=9)
    axes.set_xlim(min(speeds) / 1.5, max(speeds) * 2.5)
    _label(axes, points, best)
    axes.minorticks_off()
    labelled(axes, "speed, exact attention = 1x (right is faster)", "error of the median head (down is better)", 9)
    return figure, f"Error against speed {tradeoff.where}. Pareto front: " + "; ".join(
        f"{point.name} {factor(1 / point.speed)} with {percent(point.error)}" for point in best
    )


def _height(point: Point) -> float:
    return min(max(point.error, FLOOR), TOP) if math.isfinite(point.error) else TOP


def _label(axes: Axes, points: list[Point], best: list[Point]) -> None:
    """Names beside their points, or further up, with a line to them, where they would lie on a name or a point."""
    wide = math.log10(axes.get_xlim()[1] / axes.get_xlim()[0])
    places = [(math.log10(point.speed), math.log10(_height(point))) for point in points]
    taken = [(x - 0.01 * wide, x + 0.01 * wide, y) for x, y in places]
    for point, (x, y) in sorted(zip(points, places, strict=True), key=lambda each: (each[0] not in best, each[1][1])):
        x += 0.015 * wide
        end = x + 0.01 * wide * len(point.name)
        while any(abs(y - other) < 0.1 and x < last and start < end for start, last, other in taken):
            y += 0.02
        taken.append((x, end, y))
        weight, moved = "bold" if point in best else "normal", y > math.log10(_height(point))
        axes.annotate(
            point.name, (point.speed, _height(point)), (10**x, 10**y), textcoords="data", va="center",
            fontsize=7, fontweight=weight, color=INK if point in best else SOFT,
            arrowprops={"arrowstyle": "-", "color": PALE, "linewidth": 0.6, "relpos": (0, 0.5)} if moved else None,
        )  # fmt: skip
