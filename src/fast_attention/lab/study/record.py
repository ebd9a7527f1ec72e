"""The record of a study: a result for every mechanism and seed."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fast_attention.lab.records import Record
from fast_attention.lab.refusals import InputError

# Student's t for 95 % of two sides, by degrees of freedom.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


@dataclass
class Result:
    """One training run. ``value`` and the curve are in the task's metric, on the fixed validation set."""

    mechanism: str
    seed: int
    status: str
    value: float | None  # at the end
    best: float | None
    steps: int
    step_seconds: float  # the median over the log
    peak_bytes: int  # of one step, counted
    parameters: int
    hidden: int  # width of the feed-forward layers that makes the parameters equal
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # step, seconds, value
    # First and last position, loss there; of the model with the best value, for causal language modelling.
    by_position: list[tuple[int, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.curve = [(step, seconds, value) for step, seconds, value in self.curve]
        self.by_position = [(first, last, loss) for first, last, loss in self.by_position]


@dataclass
class Study(Record):
    """All of one study."""

    kind, noun = "study", "study"
    same = ("task", "data", "training", "model", "fast_attention")
    data, page = "study.json", "study.html"

    results: list[Result] = field(default_factory=list)

    @classmethod
    def resume(cls, path: Path, meta: dict[str, Any]) -> Self:
        """The record of a study that goes on, perhaps with more mechanisms and seeds than before.

        Raises:
            InputError: As for every record; or it holds runs that are not asked for.
        """
        record = super().resume(path, meta)
        others = [name for name in dict.fromkeys(r.mechanism for r in record.results) if name not in meta["mechanisms"]]
        if others:
            raise InputError(f"--resume: {path} holds runs of {', '.join(others)}: give these --mechanisms too")
        if (seeds := 1 + max((r.seed for r in record.results), default=-1)) > meta["seeds"]:
            raise InputError(f"--resume: {path} holds {seeds} seeds: give --seeds {seeds} or more, not {meta['seeds']}")
        return record

    @property
    def equal(self) -> str:
        """What every run had as much of; records of before this was kept call it steps, as their pages did."""
        return str(self.meta.get("equal", "steps"))

    def by_position(self, mechanism: str) -> dict[tuple[int, int], float]:
        """The loss by first and last position of each bucket, the mean over the seeds; empty where none was kept."""
        losses: dict[tuple[int, int], list[float]] = {}
        for first, last, loss in (row for result in self.of(mechanism) for row in result.by_position):
            losses.setdefault((first, last), []).append(loss)
        return {bucket: statistics.fmean(values) for bucket, values in losses.items()}

    def curve(self, mechanism: str) -> dict[float, float]:
        """The metric by steps, or by minutes where these were equal: means over the runs, where all have it."""
        timed, runs = self.equal == "minutes", [result.curve for result in self.of(mechanism) if result.curve]
        steps = sorted(set.intersection(*({step for step, _, _ in run} for run in runs))) if runs else []
        at = {step: [next(point for point in run if point[0] == step) for run in runs] for step in steps}
        ends = [[run[-1] for run in runs]] if runs else []
        return {
            statistics.fmean(seconds / 60 if timed else step for step, seconds, _ in points): statistics.fmean(
                value for _, _, value in points
            )
            for points in (*at.values(), *ends)
        }

    def of(self, mechanism: str) -> list[Result]:
        """The complete runs of a mechanism."""
        return [r for r in self.results if r.mechanism == mechanism and r.value is not None and r.status != "failed"]

    def summary(self, mechanism: str) -> Summary | None:
        """Means over the seeds, or None before the first is done."""
        results = self.of(mechanism)
        if not results:
            return None
        values = [r.value for r in results if r.value is not None]
        spread = None
        if len(values) > 1:
            student = _STUDENT[min(len(values) - 2, len(_STUDENT) - 1)]
            spread = student * statistics.stdev(values) / math.sqrt(len(values))
        seconds, peak = statistics.median(r.step_seconds for r in results), max(r.peak_bytes for r in results)
        steps = round(statistics.fmean(r.steps for r in results))
        return Summary(statistics.fmean(values), spread, len(values), steps, seconds, peak, results[0].parameters)


@dataclass(frozen=True)
class Summary:
    """A mechanism over its seeds: mean of the final values, half the width of its 95 % interval, cost of a step."""

    mean: float
    spread: float | None
    seeds: int
    steps: int  # of a run, the mean
    step_seconds: float
    peak_bytes: int
    parameters: int
