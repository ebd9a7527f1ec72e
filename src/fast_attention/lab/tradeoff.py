"""Error against speed at one length: what is worth having."""

from __future__ import annotations

from typing import NamedTuple

from fast_attention.lab.records import EXACT, Comparison
from fast_attention.lab.verdicts import longest

FLOOR, TOP = 1e-3, 3.0  # of the errors that are drawn apart: 0.1 % to 300 %


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
