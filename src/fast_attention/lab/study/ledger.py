"""What a study leaves behind: one JSON file with a result for every mechanism and seed."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fast_attention.lab import records
from fast_attention.lab.inputs import InputError

SCHEMA = "fast-attention study 1"
SAME = ("task", "mechanisms", "seeds", "training", "model", "fast_attention")
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


@dataclass
class Ledger:
    """All of one study."""

    meta: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    def of(self, mechanism: str) -> list[Result]:
        """The runs of a mechanism that came to their end."""
        return [r for r in self.results if r.mechanism == mechanism and r.value is not None and r.status != "failed"]

    def summary(self, mechanism: str) -> Summary | None:
        """Means over the seeds, or None before the first is done."""
        found = self.of(mechanism)
        if not found:
            return None
        values = [r.value for r in found if r.value is not None]
        spread = None
        if len(values) > 1:
            student = _STUDENT[min(len(values) - 2, len(_STUDENT) - 1)]
            spread = student * statistics.stdev(values) / math.sqrt(len(values))
        seconds = statistics.median(r.step_seconds for r in found)
        return Summary(
            statistics.fmean(values), spread, len(values), seconds, max(r.peak_bytes for r in found),
            found[0].parameters,
        )  # fmt: skip

    def to_json(self) -> str:
        """Numbers that are not finite become null."""
        held = {"schema": SCHEMA, "meta": self.meta, "results": [asdict(r) for r in self.results]}
        return json.dumps(records.plain(held), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """The inverse of ``to_json``."""
        held = records.opened(text, SCHEMA, "the study")
        results = [Result(**{**r, "curve": [tuple(point) for point in r["curve"]]}) for r in held["results"]]
        return cls(held["meta"], results)


@dataclass(frozen=True)
class Summary:
    """A mechanism over its seeds: mean of the final values, half the width of its 95 % interval, price of a step."""

    mean: float
    spread: float | None
    seeds: int
    step_seconds: float
    peak_bytes: int
    parameters: int


def resume(path: Path, meta: dict[str, Any]) -> Ledger:
    """The ledger of a study that was stopped.

    Raises:
        InputError: It is another study's, or damaged.
    """
    try:
        ledger = Ledger.from_json(path.read_text(encoding="utf-8"))
        started = ledger.meta["started"]
    except FileNotFoundError:
        return Ledger(meta)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--resume: {path} holds no study to go on with ({error})") from error
    other = [f"{key} was {ledger.meta.get(key)}, is {meta[key]}" for key in SAME if ledger.meta.get(key) != meta[key]]
    if other:
        raise InputError(f"--resume: {path} is of another study: {'; '.join(other)}")
    ledger.meta = {**meta, "started": started}
    return ledger
