"""Draws error against speed, with the Pareto front, at the length at which both are known."""

from __future__ import annotations

import math
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fast_attention.lab.comparison import Comparison
from fast_attention.lab.drawing import COLOURS, GOOD, INK, PALE, SOFT, STYLE, Picture, svg
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

    @property
    def height(self) -> float:
        """The error as it is drawn."""
        return min(max(self.error, FLOOR), TOP) if math.isfinite(self.error) else TOP


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


def scatter(tradeoff: Tradeoff, allowed: float | None = None) -> Picture:
    """Speed to the right, error upwards; lines at exact attention's speed and at the error that is allowed."""
    best, shown = tradeoff.best, [point for point in tradeoff.points if point.name != EXACT]
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(7.6, 4.6), layout="constrained", dpi=72)  # an SVG's: a pixel is a point
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log", ylabel="error of the median head")
        axes.set_xlabel("speed (exact attention: 1x, the line)")
        nearest = min(p.height for p in shown)
        is_far = allowed is not None and allowed < nearest / 2  # the line would leave half of the picture empty
        speeds, errors = [1.0, *(p.speed for p in shown)], [p.height for p in shown]
        errors += [allowed] if allowed and not is_far else []
        axes.set(xlim=(min(speeds) / 1.3, max(speeds) * 1.6), ylim=(max(min(errors), FLOOR) / 1.5, max(errors) * 1.6))
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        ticks = [tick for tick in TICKS if left < tick < right]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        ticks = [tick for tick in (*TICKS, TOP) if low < tick < high and tick <= TOP]
        axes.set_yticks(ticks, [f"{100 * tick:g} %{' or more' if tick == TOP else ''}" for tick in ticks])
        axes.minorticks_off()
        axes.grid()
        axes.axvline(1.0, color=INK, linewidth=0.8)
        names = [("exact attention", 1.0, 1.25 * low, INK)]
        if allowed and is_far:
            names.append((f"allowed: {percent(allowed)}, below this picture", right, 1.15 * low, COLOURS[1]))
        elif allowed:
            axes.axhline(allowed, color=COLOURS[1], linewidth=0.9, linestyle=":")
            names.append((f"allowed: {percent(allowed)}", right, 1.15 * allowed, COLOURS[1]))
        for point in sorted(shown, key=lambda point: (point not in best, point.error)):
            axes.plot(point.speed, point.height, "o", color=GOOD if point in best else PALE, markersize=6, zorder=2)
            names.append((point.name, point.speed, point.height, INK if point in best else SOFT))
        _label(figure, axes, names)
        front = (f"{point.name} {factor(1 / point.speed)} with {percent(point.error)}" for point in best)
        alt = f"Error against speed at {tradeoff.length:,} tokens. Pareto front: {'; '.join(front)}"
        return Picture(svg(figure, alt), alt)


def _label(figure: Figure, axes: Axes, names: list[tuple[str, float, float, str]]) -> None:
    """Names beside their points, at the nearest place that is free of points, of other names and of the line at 1."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    inside, places = axes.get_window_extent(), axes.transData.transform([(x, y) for _, x, y, _ in names])
    middle = axes.transData.transform((1.0, 1.0))[0]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    taken.append(Bbox.from_extents(middle - 1, inside.y0, middle + 1, inside.y1))
    for (name, x, y, colour), (across, up) in zip(names, places, strict=True):
        text = axes.annotate(name, (x, y), (0, 0), textcoords="offset points", fontsize=7, color=colour, va="center")
        wide = text.get_window_extent(canvas.get_renderer()).width
        tried = [
            (move, rise, Bbox.from_extents(across + move, up + rise - HIGH, across + move + wide, up + rise + HIGH))
            for far, rise in PLACES
            for move in (far, -far - wide)
        ]
        move, rise, box = next((each for each in tried if _is_free(each[2], inside, taken)), tried[0])
        text.set_position((move, rise))
        taken.append(box)
        if abs(rise) > 9 or move not in (tried[0][0], tried[1][0]):
            end, arrow = (move if move > 0 else move + wide, rise), {"arrowstyle": "-", "color": PALE, "linewidth": 0.6}
            axes.annotate("", (x, y), end, textcoords="offset points", arrowprops=arrow)


def _is_free(box: Bbox, inside: Bbox, taken: list[Bbox]) -> bool:
    within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
    return within and not any(box.overlaps(other) for other in taken)
