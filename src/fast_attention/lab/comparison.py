"""The record of a comparison with exact attention: errors on real tensors beside times and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fast_attention.lab.records import EXACT, Timed


@dataclass
class Error:
    """Error of one mechanism on real tensors of one length: a row per layer, a number per head."""

    mechanism: str
    length: int
    against: str
    output: list[list[float]] = field(default_factory=list)  # relative RMS of the outputs
    note: str = ""
    visible_fraction: float | None = None  # of the visible pairs, those that it weighs; None: it weighs no pairs

    def __post_init__(self) -> None:
        for row in self.output:  # JSON knows no infinity
            row[:] = [math.inf if value is None else value for value in row]

    def summary(self) -> tuple[float, float] | None:
        """Median and worst over all heads of all layers; None where nothing was measured."""
        values = sorted(value if math.isfinite(value) else math.inf for row in self.output for value in row)
        return (values[len(values) // 2], values[-1]) if values else None


@dataclass
class Comparison(Timed):
    """All of one comparison with exact attention."""

    kind, noun, keys = "compare", "comparison", {"cells": "rows"}
    data, page = "records.json", "report.html"

    errors: list[Error] = field(default_factory=list)

    @property
    def length(self) -> int | None:
        """The one length at which error and speed are compared: the greatest with both, else with errors."""
        known = {error.length for error in self.errors if error.output}
        timed = {length for length in known if length in self.ratios(EXACT)}
        return max(timed or known, default=None)

    def error(self, mechanism: str, length: int | None = None) -> Error | None:
        """The error at ``length``, or at the one length at which error and speed are compared."""
        at = length or self.length
        held = (error for error in self.errors if (error.mechanism, error.length) == (mechanism, at) and error.output)
        return next(held, None)
