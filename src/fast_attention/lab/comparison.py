"""The record of a comparison with exact attention: errors on real tensors beside times and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from fast_attention.lab.records import EXACT, Timed


@dataclass
class Error:
    """Error of one mechanism on real tensors of one length: a row per layer, a number per head."""

    mechanism: str
    length: int
    against: str
    output: list[list[float]] = field(default_factory=list)  # relative RMS of the outputs
    matrix: list[list[float]] | None = None  # relative Frobenius norm of the attention matrix
    note: str = ""
    visible_fraction: float | None = None  # of the visible pairs, those that it weighs; None: it weighs no pairs

    def __post_init__(self) -> None:
        for rows in (self.output, self.matrix or []):  # JSON knows no infinity
            rows[:] = [[math.inf if value is None else value for value in row] for row in rows]

    def summary(self, which: Literal["output", "matrix"] = "output") -> tuple[float, float] | None:
        """Median and worst over all heads of all layers; None where nothing was measured."""
        rows = self.output if which == "output" else self.matrix
        values = sorted(value if math.isfinite(value) else math.inf for row in rows or [] for value in row)
        return (values[len(values) // 2], values[-1]) if values else None


class Matrices(NamedTuple):
    """Attention matrices (L, L) of one head, to draw; not part of the JSON."""

    where: str
    exact: Tensor
    approximate: dict[str, Tensor]


@dataclass
class Comparison(Timed):
    """All of one comparison with exact attention."""

    kind, noun, keys = "compare", "comparison", {"cells": "rows", "matrices": ""}
    data, page = "records.json", "report.html"

    errors: list[Error] = field(default_factory=list)
    matrices: Matrices | None = None

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
