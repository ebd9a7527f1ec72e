"""Draws pictures as inline SVG, whose colours a page sets anew in the dark; draws error against speed."""

from __future__ import annotations

import io
import math
import re
from html import escape
from typing import Any, NamedTuple

import matplotlib
import matplotlib.colors
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fast_attention.lab.records import EXACT, Comparison, Pass
from fast_attention.lab.tables import factor, percent

INK, PALE, GRID, GOOD, SOFT, PAPER = "#1f2933", "#9aa5b1", "#e4e7eb", "#2f855a", "#52606d", "#ffffff"
COLOURS = ("#0b69a3", "#d64545", "#8d5fd3", "#b7791f", GOOD, "#718096")
DARK = {  # what stands for a colour in the dark
    INK: "#e6ebf0", PALE: "#7b8794", GRID: "#2c353e", SOFT: "#aeb9c4", PAPER: "#14181d", COLOURS[0]: "#5ab0e8",
    COLOURS[1]: "#f08080", COLOURS[2]: "#b79bf0", COLOURS[3]: "#e0a84a", COLOURS[4]: "#58bd87", COLOURS[5]: "#a3b1c2",
}  # fmt: skip
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "fast-attention", "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"], "font.size": 8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": PALE, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "text.color": INK, "legend.frameon": False, "axes.axisbelow": True, "axes.titlesize": 9,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "grid.color": GRID, "grid.linewidth": 0.5,
}  # fmt: skip


class Picture(NamedTuple):
    """An SVG element and its alternative text."""

    svg: str
    alt: str

    @property
    def themed(self) -> str:
        """The picture for a page, whose style sheet has a variable for each colour: ``--1f2933``."""
        return re.sub("|".join(DARK), lambda match: f"var(--{match[0][1:]})", self.svg)


def svg(figure: Figure, alt: str) -> str:
    """The figure as an SVG element that scales with the page, with its alternative text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


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


def tradeoff(record: Comparison, length: int | None, which: Pass = "forward") -> Tradeoff | None:
    """The points of a record at a length; None where no approximation has both an error and a time there."""
    if length is None:
        return None
    points = [Point(EXACT, 1.0, 0.0)]
    for name in record.mechanisms:
        ratio, error = record.ratios(name, which).get(length), record.error(name, length)
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
