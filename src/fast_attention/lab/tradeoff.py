"""Error against speed at one length: what is worth having, and the picture of it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from fast_attention.lab.numbers import factor, percent
from fast_attention.lab.pictures import INK, PALE, STYLE, Picture, svg
from fast_attention.lab.records import EXACT, Comparison
from fast_attention.lab.verdicts import longest

FLOOR, TOP = 1e-3, 3.0  # of the errors that are drawn apart: 0.1 % to 300 %
GOOD = "#2f855a"


class Point(NamedTuple):
    """An approximation, or exact attention."""

    name: str
    speed: float  # exact attention's time divided by its own
    error: float  # of the median head


class Tradeoff(NamedTuple):
    """Points at the greatest length at which both are known; at two lengths, where there is no such one."""

    points: list[Point]
    error_length: int
    speed_length: int

    @property
    def where(self) -> str:
        """The length, or both."""
        if self.error_length == self.speed_length:
            return f"at {self.speed_length:,} tokens"
        return f"error at {self.error_length:,} tokens, speed at {self.speed_length:,}"

    @property
    def best(self) -> list[Point]:
        """Those of which no other is both faster and more accurate, the most accurate first."""
        ranked = sorted(self.points, key=lambda point: (point.error, -point.speed))
        found: list[Point] = []
        for point in ranked:
            if not found or point.speed > found[-1].speed:
                found.append(point)
        return found


def tradeoff(record: Comparison) -> Tradeoff | None:
    """The points of a record; None where no approximation has both an error and a time."""
    errors = {(error.mechanism, error.length): error for error in record.errors if error.output}
    known = sorted({length for _, length in errors}, reverse=True)
    last = longest(record)
    pairs = [(length, length) for length in known if record.cell(EXACT, length) is not None]
    pairs += [(length, last) for length in known if last is not None]
    for error_length, speed_length in pairs:
        points = [Point(EXACT, 1.0, 0.0)]
        for name in record.mechanisms:
            cell, error = record.cell(name, speed_length), errors.get((name, error_length))
            found = error.summary() if error else None
            if cell is not None and cell.forward_ratio is not None and found is not None:
                points.append(Point(name, 1 / cell.forward_ratio, found[0]))
        if len(points) > 1:
            return Tradeoff(points, error_length, speed_length)
    return None


def scatter(found: Tradeoff) -> Picture:
    """Speed to the right, error downwards to nothing, and a line through what is worth having."""
    best = found.best
    alt = f"Error against speed {found.where}. Worth having: " + "; ".join(
        f"{point.name} {factor(1 / point.speed)} with {percent(point.error)}" for point in best
    )
    with matplotlib.rc_context({**STYLE, "font.size": 9}):
        figure = Figure(figsize=(7.6, 4.6), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axvline(1.0, color=INK, linewidth=0.8)
        axes.step([p.speed for p in best], list(map(_height, best)), where="pre", color=GOOD, linewidth=1.4, zorder=1)
        for point in found.points:
            colour = INK if point.name == EXACT else GOOD if point in best else PALE
            axes.plot(point.speed, _height(point), "o", color=colour, markersize=6, zorder=2)
        _label(axes, found.points, best)
        axes.set_ylim(FLOOR / 1.5, TOP * 1.5)
        axes.set_yticks(
            [FLOOR, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, TOP],
            ["0.1 % or less", "0.3 %", "1 %", "3 %", "10 %", "30 %", "100 %", "300 % or more"],
        )
        speeds = [point.speed for point in found.points]
        ticks = [
            s
            for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
            if min(speeds) / 2 < s < 2 * max(speeds)
        ]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.set_xlim(min(speeds) / 1.5, max(speeds) * 2.5)
        axes.minorticks_off()
        axes.grid(color="#e4e7eb", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_xlabel("speed, exact attention = 1x (right is faster)")
        axes.set_ylabel("error of the median head (down is better)")
        return Picture(svg(figure, alt), alt)


def _height(point: Point) -> float:
    return min(max(point.error, FLOOR), TOP) if math.isfinite(point.error) else TOP


def _label(axes: Any, points: list[Point], best: list[Point]) -> None:
    """Names beside their points, pushed upwards where they would lie on one another."""
    taken: list[tuple[float, float, float]] = []
    for point in sorted(points, key=lambda p: (p not in best, _height(p))):
        x, y = math.log10(point.speed), math.log10(_height(point))
        width = 0.017 * len(point.name)
        while any(abs(y - other) < 0.085 and x < end and start < x + width for start, end, other in taken):
            y += 0.02
        taken.append((x, x + width, y))
        weight = "bold" if point in best else "normal"
        axes.annotate(
            point.name, (point.speed, _height(point)), (10 ** (x + 0.02), 10**y), textcoords="data", va="center",
            fontsize=7, fontweight=weight, color=INK if point in best else "#52606d",
        )  # fmt: skip
