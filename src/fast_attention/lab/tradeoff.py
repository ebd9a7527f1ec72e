"""Compares error with speed at one length: the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from fast_attention.lab.records import EXACT, Comparison
from fast_attention.lab.verdicts import longest

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
        """The Pareto front: no other point is both faster and more accurate; the most accurate first."""
        return frontier(self.points, lambda point: (point.error, point.speed), rising=True)


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
            summary = error.summary() if error else None
            if cell is not None and cell.forward_ratio is not None and summary is not None:
                points.append(Point(name, 1 / cell.forward_ratio, summary[0]))
        if len(points) > 1:
            return Tradeoff(points, error_length, speed_length)
    return None
