"""Compares error with speed at one length: the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from fast_attention.lab.comparison import Comparison
from fast_attention.lab.records import EXACT

FLOOR, TOP = 1e-3, 3.0  # of the errors that are drawn apart: 0.1 % to 300 %


T = TypeVar("T")


def frontier(points: Iterable[T], of: Callable[[T], tuple[float, float]], *, rising: bool) -> list[T]:
    """The points that no other beats, by rising cost.

    Args:
        points: What is compared.
        of: Cost and quality of a point.
        rising: Whether more quality is better, rather than less.
    """
    sign, best = -1 if rising else 1, []
    for point in sorted(points, key=lambda point: (of(point)[0], sign * of(point)[1])):
        if not best or sign * of(point)[1] < sign * of(best[-1])[1]:
            best.append(point)
    return best


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
    def where(self) -> str:
        """The length."""
        return f"at {self.length:,} tokens"

    @property
    def best(self) -> list[Point]:
        """The Pareto front: no other point is both faster and more accurate; the most accurate first."""
        return frontier(self.points, lambda point: (point.error, point.speed), rising=True)


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
