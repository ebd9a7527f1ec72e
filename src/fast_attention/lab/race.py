"""One length: everyone is built, warmed up, weighed and then timed in turn, round by round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fast_attention.lab import measure
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import Competitor, Setting
from fast_attention.lab.records import EXACT, Cell, Record
from fast_attention.mechanism import Unsupported

FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
SLOW = 0.1  # seconds: a call this long is warm after one
PATIENCE = 4  # a cell may take this many times its even share of the time before it is over budget


@dataclass
class Race:
    """All competitors at one length.

    Args:
        setting: What they are measured with.
        mechanisms: Who runs, beside exact attention.
        record: Where the cells go.
        length: Tokens.
        share: Seconds for this length.
        watch: Told of every step.
    """

    setting: Setting
    mechanisms: list[Any]
    record: Record
    length: int
    share: float
    watch: Callable[[str], None]
    started: float = field(default_factory=time.perf_counter)
    runners: dict[str, Competitor] = field(default_factory=dict)
    estimates: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        """Seconds since this length began."""
        return time.perf_counter() - self.started

    def run(self) -> None:
        """Measure everyone."""
        tensors = self.setting.tensors(self.length)
        self.enter(EXACT, 2.0, lambda: measure.exact(self.setting, tensors))
        for mechanism in self.mechanisms:
            make = lambda m=mechanism: measure.competitor(m, self.setting, tensors)  # noqa: E731
            self.enter(repr(mechanism), mechanism.traits.order, make)
        self.race()
        self.runners.clear()
        gc.collect()

    def enter(self, name: str, order: float, make: Callable[[], Competitor]) -> None:
        """Build a competitor, warm it up and weigh it; one that cannot run or would take too long says so."""
        self.watch(f"{self.length:,} tokens: {name}")
        cell = Cell(name, self.length)
        self.record.cells.append(cell)
        reason = "" if name == EXACT else self.too_much(name, order)
        if reason:
            cell.status, cell.note = "over budget", reason
            return
        try:
            runner, setting = make(), self.setting
            self.estimates[name] = _warm(runner, setting)
            for cost, value in measure.costs(runner, setting).items():
                setattr(cell, cost, value)
            self.runners[name] = runner
        except Unsupported as error:
            cell.status, cell.note = "refused", _line(error)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:  # a fault, not a refusal
            cell.status, cell.note = "failed", f"{type(error).__name__}: {_line(error)}"
        if name == EXACT and cell.status == "failed":
            raise InputError(f"exact attention itself fails at {self.length} tokens: {cell.note}")

    def too_much(self, name: str, order: float) -> str:
        """Why this cell is not worth its time or memory, foretold from the shorter lengths; empty if it is."""
        if self.spent > 1.5 * self.share:
            return f"the {self.share:.0f} s for {self.length:,} tokens were spent before its turn"
        cells = [c for c in self.record.cells if c.mechanism == name and c.forward_ms is not None]
        if not cells:
            return ""
        before = max(cells, key=lambda cell: cell.length)
        grown = (self.length / before.length) ** max(order, 1.0)
        foretold = ((before.forward_ms or 0.0) + (before.training_ms or 0.0)) / 1000 * grown
        allowed = PATIENCE * self.share / (len(self.mechanisms) + 1) / (FEWEST_ROUNDS + 3)
        if foretold > allowed:
            return f"one pass would take about {foretold:.1f} s, more than the {allowed:.1f} s that the budget allows"
        bytes_before = max(before.training_bytes or 0, before.forward_bytes or 0) + (before.weight_bytes or 0)
        if bytes_before * grown > measure.memory_at_hand(self.setting.device) / 2:
            return f"it would take about {bytes_before * grown / 2**30:.1f} GiB, more than half of the free memory"
        return ""

    def race(self) -> None:
        """Rounds in which everyone runs once in turn, until the time is spent; an interruption keeps whole rounds."""
        forward: dict[str, list[float]] = {name: [] for name in self.runners}
        training: dict[str, list[float]] = {name: [] for name in self.runners}
        setting, names, began = self.setting, list(self.runners), self.spent
        try:
            for number in range(MOST_ROUNDS):
                self.watch(f"{self.length:,} tokens: round {number + 1}")
                next_round = (self.spent - began) / max(number, 1)
                patience = 1.0 if number >= FEWEST_ROUNDS else 2.0
                if number and self.spent + next_round > patience * self.share:
                    break
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    runner, (once, both) = self.runners[name], self.estimates[name]
                    repeats = measure.repeats_for(once)
                    forward[name].append(measure.seconds(runner.forward, setting.device, repeats))
                    if setting.backward:
                        repeats = measure.repeats_for(both)
                        training[name].append(measure.seconds(runner.training, setting.device, repeats))
        finally:
            for name in names:
                self.note(name, forward, training)

    def note(self, name: str, forward: dict[str, list[float]], training: dict[str, list[float]]) -> None:
        """Write the summary of a competitor's samples into its cell."""
        cell = self.record.cell(name, self.length)
        if cell is None or not forward[name] or not forward[EXACT]:
            return
        found = measure.timing(forward[name], forward[EXACT])
        cell.status, cell.rounds = "measured", found.rounds
        cell.forward_ms, cell.forward_ratio = found.median * 1000, found.ratio
        cell.forward_best_ratio = found.best_ratio
        if training[name] and training[EXACT]:
            found = measure.timing(training[name], training[EXACT])
            cell.training_ms, cell.training_ratio = found.median * 1000, found.ratio
            cell.training_best_ratio = found.best_ratio


def _warm(runner: Competitor, setting: Setting) -> tuple[float, float]:
    """Seconds of one call of each pass; of the second call where the first, which pays for set-up, was short."""
    found = []
    for run in (runner.forward, runner.training) if setting.backward else (runner.forward,):
        first = measure.seconds(run, setting.device)
        found.append(measure.seconds(run, setting.device) if first < SLOW else first)
    return found[0], found[-1]


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
