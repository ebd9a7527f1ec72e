"""Draws error against speed, with the Pareto front, at the length at which both are known."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fast_attention.lab.comparison import Comparison
from fast_attention.lab.drawing import COLOURS, GOOD, INK, PALE, SOFT, figure_grid, labelled, picture
from fast_attention.lab.numbers import factor, percent
from fast_attention.lab.records import EXACT

FLOOR, TOP = 1e-3, 3.0  # of the errors that are drawn apart: 0.1 % to 300 %
TICKS = [scale * 10.0**power for power in range(-4, 4) for scale in (1, 2, 5)]
HIGH = 6  # half of a name's height, in points
PLACES = [(far, rise) for far in (9, 24, 45, 70) for rise in (0, 9, -9, 18, -18, 27, -27, 38, -38, 50, -50)]


class Point(NamedTuple):
    """An approximation, or exact attention."""

    name: str
    speed: float  # exact attention's time divided by its own
    error: float  # of the median head


class Tradeoff(NamedTuple):
    """Points at the greatest length at which both error and speed are known."""

    points: list[Point]
    length: int

    @property
    def best(self) -> list[Point]:
        """The Pareto front: no other point is both faster and more accurate; the most accurate first."""
        front: list[Point] = []
        for point in sorted(self.points, key=lambda point: (point.error, -point.speed)):
            if not front or point.speed > front[-1].speed:
                front.append(point)
        return front


def tradeoff(record: Comparison) -> Tradeoff | None:
    """The points of a record; None where no approximation has both an error and a time at one length."""
    length = record.length
    if length is None:
        return None
    points = [Point(EXACT, 1.0, 0.0)]
    for name in record.mechanisms:
        ratio, error = record.ratios(name).get(length), record.error(name)
        summary = error.summary() if error else None
        if ratio is not None and summary is not None:
            points.append(Point(name, 1 / ratio, summary[0]))
    return Tradeoff(points, length) if len(points) > 1 else None


@picture
def scatter(tradeoff: Tradeoff, allowed: float | None = None) -> tuple[Figure, str]:
    """Speed to the right, error upwards; lines at exact attention's speed and at the error that is allowed."""
    best, points = tradeoff.best, tradeoff.points
    shown = [point for point in points if point.name != EXACT]
    figure, (axes,) = figure_grid(4.6, width=7.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    speeds, errors = [1.0, *(point.speed for point in shown)], [*map(_height, shown), *([allowed] if allowed else [])]
    axes.set_xlim(min(speeds) / 1.3, max(speeds) * 1.6)
    axes.set_ylim(max(min(errors), FLOOR) / 1.5, max(errors) * 1.6)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    if allowed:
        axes.axhline(allowed, color=COLOURS[1], linewidth=0.9, linestyle=":")
    for point in shown:
        axes.plot(point.speed, _height(point), "o", color=GOOD if point in best else PALE, markersize=6, zorder=2)
    ticks = [tick for tick in TICKS if axes.get_xlim()[0] < tick < axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], fontsize=9)
    ticks = [tick for tick in (*TICKS, TOP) if axes.get_ylim()[0] < tick < axes.get_ylim()[1] and tick <= TOP]
    words = [f"{100 * tick:g} %{' or more' if tick == TOP else ''}" for tick in ticks]
    axes.set_yticks(ticks, words, fontsize=9)
    axes.minorticks_off()
    labelled(axes, "speed (exact attention: 1x, the line)", "error of the median head", 9)
    notes = [("exact attention", 1.0, 1.25 * axes.get_ylim()[0], INK)]
    if allowed:
        notes.append((f"allowed: {percent(allowed)}", axes.get_xlim()[0], 1.15 * allowed, COLOURS[1]))
    ranked = sorted(shown, key=lambda point: (point not in best, point.error))
    _label(axes, [*notes, *((p.name, p.speed, _height(p), INK if p in best else SOFT) for p in ranked)])
    return figure, f"Error against speed at {tradeoff.length:,} tokens. Pareto front: " + "; ".join(
        f"{point.name} {factor(1 / point.speed)} with {percent(point.error)}" for point in best
    )


def _height(point: Point) -> float:
    return min(max(point.error, FLOOR), TOP) if math.isfinite(point.error) else TOP


def _label(axes: Axes, labels: list[tuple[str, float, float, str]]) -> None:
    """Names beside their points, at the nearest place that is free of points, of other names and of the line at 1."""
    figure: Any = axes.figure
    figure.set_dpi(72)  # an SVG's: a pixel is a point
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    inside, places = axes.get_window_extent(), axes.transData.transform([(x, y) for _, x, y, _ in labels])
    middle = axes.transData.transform((1.0, 1.0))[0]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    taken.append(Bbox.from_extents(middle - 1, inside.y0, middle + 1, inside.y1))
    for (name, x, y, colour), (across, up) in zip(labels, places, strict=True):
        text = axes.annotate(name, (x, y), (0, 0), textcoords="offset points", fontsize=7, color=colour, va="center")
        wide = text.get_window_extent(canvas.get_renderer()).width
        tried = [
            (move, rise, Bbox.from_extents(across + move, up + rise - HIGH, across + move + wide, up + rise + HIGH))
            for far, rise in PLACES
            for move in (far, -far - wide)
        ]
        free = (each for each in tried if _is_free(each[2], inside, taken))
        move, rise, box = next(free, tried[0])
        text.set_position((move, rise))
        taken.append(box)
        if abs(rise) > 9 or move not in (tried[0][0], tried[1][0]):
            end = (move if move > 0 else move + wide, rise)
            arrow = {"arrowstyle": "-", "color": PALE, "linewidth": 0.6}
            axes.annotate("", (x, y), end, textcoords="offset points", arrowprops=arrow)


def _is_free(box: Bbox, inside: Bbox, taken: list[Bbox]) -> bool:
    within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
    return within and not any(box.overlaps(other) for other in taken)
