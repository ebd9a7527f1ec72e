"""One length: everyone is built, warmed up, weighed and then timed in turn, round by round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fast_attention import clock
from fast_attention.lab import measure
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import Competitor, Setting
from fast_attention.lab.records import EXACT, Cell, Timed
from fast_attention.mechanism import Unsupported

FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
SLOW = 0.1  # seconds: a call this long is warm after one
PASSES = FEWEST_ROUNDS + 3  # with the warm-up and the two that are watched for memory and operations


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
    record: Timed
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
        self.enter(EXACT, lambda: measure.exact(self.setting, tensors))
        for mechanism, reason in self.admitted():
            if reason:
                self.watch(f"{self.length:,} tokens: {mechanism!r}")
                self.record.cells.append(Cell(repr(mechanism), self.length, "over budget", reason))
            else:
                self.enter(repr(mechanism), lambda m=mechanism: measure.competitor(m, self.setting, tensors))
        self.race()
        self.runners.clear()
        gc.collect()

    def enter(self, name: str, make: Callable[[], Competitor]) -> None:
        """Build a competitor, warm it up and weigh it; one that cannot run says so."""
        self.watch(f"{self.length:,} tokens: {name}")
        cell = Cell(name, self.length)
        self.record.cells.append(cell)
        is_reference = self.against(name) == name
        if self.spent > 1.5 * self.share and not is_reference:
            cell.status = "over budget"
            cell.note = f"the {self.share:.0f} s for {self.length:,} tokens were spent before its turn"
            return
        try:
            runner = make()
            self.estimates[name] = self.prepare(runner, cell)
            self.runners[name] = runner
        except Unsupported as error:
            cell.status, cell.note = "refused", _line(error)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:  # a fault, not a refusal
            cell.status, cell.note = "failed", f"{type(error).__name__}: {_line(error)}"
        if is_reference and cell.status == "failed":
            raise InputError(f"exact attention itself fails at {self.length} tokens: {cell.note}")

    def against(self, name: str) -> str:
        """The competitor whose times are the line to beat; a line to beat is its own."""
        return EXACT

    def cell(self, name: str) -> Cell | None:
        """Where a competitor's summary goes."""
        return self.record.cell(name, self.length)

    def prepare(self, runner: Competitor, cell: Cell) -> tuple[float, float]:
        """Warm a competitor up and weigh it into its cell; seconds of one call of each pass."""
        found = _warm(runner, self.setting)
        for cost, value in measure.costs(runner, self.setting).items():
            setattr(cell, cost, value)
        return found

    def rests(self, name: str, number: int) -> bool:
        """Whether a competitor sits out a round; once it has, it runs in no later one."""
        return False

    def enough(self, number: int, cost: float) -> bool:
        """Whether to stop before a round that will take ``cost`` seconds."""
        patience = 1.0 if number >= FEWEST_ROUNDS else 2.0
        return number > 0 and self.spent + cost > patience * self.share

    def admitted(self) -> list[tuple[Any, str]]:
        """The mechanisms, the quickest first, each with why it is not worth its time or memory, or nothing.

        Times and memory are foretold from the greatest length before; what is not known yet is tried.
        """
        foretold = {mechanism: self.foretell(mechanism) for mechanism in self.mechanisms}
        ranked = sorted(self.mechanisms, key=lambda mechanism: foretold[mechanism][0])
        room, found = measure.memory_at_hand(self.setting.device) / 2, []
        left = self.share
        for mechanism in ranked:
            seconds, size = foretold[mechanism]
            left -= seconds * PASSES
            if size > room:
                reason = f"it would take about {size / 2**30:.1f} GiB, more than half of the free memory"
            elif left < 0:
                reason = f"about {seconds:.1f} s a pass: the quicker ones fill the {self.share:.0f} s for this length"
            else:
                reason = ""
            found.append((mechanism, reason))
        return found

    def foretell(self, mechanism: Any) -> tuple[float, float]:
        """Seconds of one pass of each kind, and bytes, from the greatest length at which it was measured."""
        return self.predicted(repr(mechanism), mechanism.traits.order)

    def predicted(self, name: str, order: float) -> tuple[float, float]:
        """The same for whoever is called ``name`` and grows with the power ``order`` of the length."""
        return foretold(self.record.cells, name, order, self.length)

    def race(self) -> None:
        """Rounds in which everyone runs once in turn, until the time is spent; an interruption keeps whole rounds."""
        forward: dict[str, list[float]] = {name: [] for name in self.runners}
        training: dict[str, list[float]] = {name: [] for name in self.runners}
        setting, names = self.setting, list(self.runners)
        try:
            for number in range(MOST_ROUNDS):
                self.watch(f"{self.length:,} tokens: round {number + 1}")
                turn = [*names[number % len(names) :], *names[: number % len(names)]]
                running = [name for name in turn if not self.rests(name, number)]
                if self.enough(number, sum(map(self.cost, running))):
                    break
                for name in running:
                    runner, (once, both) = self.runners[name], self.estimates[name]
                    repeats = measure.repeats_for(once)
                    forward[name].append(clock.seconds(runner.forward, setting.device, repeats))
                    if setting.backward:
                        repeats = measure.repeats_for(both)
                        training[name].append(clock.seconds(runner.training, setting.device, repeats))
        finally:
            for name in names:
                self.note(name, forward, training)

    def cost(self, name: str) -> float:
        """Seconds that a competitor will take for its part of a round."""
        passes = self.estimates[name] if self.setting.backward else self.estimates[name][:1]
        return sum(seconds * measure.repeats_for(seconds) for seconds in passes)

    def note(self, name: str, forward: dict[str, list[float]], training: dict[str, list[float]]) -> None:
        """Write the summary of a competitor's samples into its cell."""
        cell = self.cell(name)
        line = self.against(name)
        if cell is None or not forward[name] or not forward[line]:
            return
        found = measure.timing(forward[name], forward[line])
        cell.status, cell.rounds = "measured", found.rounds
        cell.forward_ms, cell.forward_ratio = found.median * 1000, found.ratio
        cell.forward_best_ms, cell.forward_best_ratio = found.best * 1000, found.best_ratio
        cell.forward_low, cell.forward_high = found.low, found.high
        if training[name] and training[line]:
            found = measure.timing(training[name], training[line])
            cell.training_ms, cell.training_ratio = found.median * 1000, found.ratio
            cell.training_best_ms, cell.training_best_ratio = found.best * 1000, found.best_ratio
            cell.training_low, cell.training_high = found.low, found.high


def foretold(cells: list[Cell], name: str, order: float, length: int) -> tuple[float, float]:
    """Seconds of one pass of each kind, and bytes, at ``length``: from the greatest shorter one that was measured."""
    own = [c for c in cells if c.mechanism == name and c.length < length and c.forward_best_ms is not None]
    if not own:
        return 0.0, 0.0
    before = max(own, key=lambda cell: cell.length)
    grown = (length / before.length) ** max(order, 1.0)
    size = (before.peak_bytes or 0) + (before.weight_bytes or 0)
    return ((before.forward_best_ms or 0.0) + (before.training_best_ms or 0.0)) / 1000 * grown, size * grown


def _warm(runner: Competitor, setting: Setting) -> tuple[float, float]:
    """Seconds of one call of each pass; of the second call where the first, which pays for set-up, was short."""
    found = []
    for run in (runner.forward, runner.training) if setting.backward else (runner.forward,):
        first = clock.seconds(run, setting.device)
        found.append(clock.seconds(run, setting.device) if first < SLOW else first)
    return found[0], found[-1]


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
