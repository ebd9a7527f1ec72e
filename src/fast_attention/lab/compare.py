"""The comparison: errors on real tensors, then times at every length, into a record that is whole at any moment."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fast_attention import catalogue
from fast_attention.lab import measure
from fast_attention.lab.accuracy import accuracy, measurable
from fast_attention.lab.capture import Source
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import Competitor, Setting
from fast_attention.lab.records import EXACT, Cell, Record
from fast_attention.mechanism import Unsupported

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
VARIANTS = ()
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
PATIENCE = 4  # a cell may take this many times its even share of the time before it is over budget


def default_mechanisms() -> list[Any]:
    """Every mechanism of the catalogue but exact attention itself, and a few settings worth seeing beside the default."""
    chosen = [catalogue.default(name) for name in catalogue.names() if name != "Softmax"]
    return list(dict.fromkeys([*chosen, *map(catalogue.parse, VARIANTS)]))


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Plan:
    """What to compare, and whom to tell: ``watch(what)`` at every step, ``watch("")`` between rounds, ``save()`` after
    every length."""

    source: Source
    mechanisms: list[Any]
    lengths: list[int]
    setting: Setting
    budget: float  # seconds for all timing
    watch: Callable[[str], None] = _nothing
    save: Callable[[], None] = _nothing

    @property
    def steps(self) -> int:
        """How often ``watch`` will be called."""
        errors = len(self.error_lengths) * len(self.mechanisms)
        return errors + len(self.lengths) * (len(self.mechanisms) + 1)

    @property
    def error_lengths(self) -> list[int]:
        """The lengths that the model can read."""
        longest = self.source.context or 1024
        return sorted({min(length, longest) for length in self.lengths})


def compare(plan: Plan, record: Record) -> None:
    """Fill ``record``. Interrupted, it holds what was measured until then."""
    _errors(plan, record)
    plan.save()
    left, previous = plan.budget, 0
    for number, length in enumerate(plan.lengths):
        started = time.perf_counter()
        share = left * length / sum(plan.lengths[number:])
        _Length(plan, record, length, previous, share).run()
        left = max(left - (time.perf_counter() - started), 1.0)
        previous = length
        plan.save()


def _errors(plan: Plan, record: Record) -> None:
    """Errors at every length the model can read; the matrix at the greatest such length of at most 512."""
    read: dict[int, str] = {}
    record.meta["error_tensors"] = read
    done: set[int] = set()
    for length in plan.error_lengths:
        layers, what = plan.source.layers(length)
        actual = layers[0].q.shape[-2]
        for mechanism in plan.mechanisms:
            plan.watch(f"error at {actual:,} tokens: {mechanism!r}")
            if measurable(mechanism) and actual not in done:
                record.errors.append(accuracy(mechanism, layers, plan.setting, matrix=True))
        done.add(actual)
        read[actual] = what


@dataclass
class _Length:
    """All competitors at one length."""

    plan: Plan
    record: Record
    length: int
    previous: int
    share: float
    started: float = field(default_factory=time.perf_counter)
    runners: dict[str, Competitor] = field(default_factory=dict)
    estimates: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.started

    def run(self) -> None:
        tensors = self.plan.setting.tensors(self.length)
        self.enter(EXACT, 2.0, lambda: measure.exact(self.plan.setting, tensors))
        for mechanism in self.plan.mechanisms:
            make = lambda m=mechanism: measure.competitor(m, self.plan.setting, tensors)  # noqa: E731
            self.enter(repr(mechanism), mechanism.traits.order, make)
        self.race()
        self.runners.clear()
        gc.collect()

    def enter(self, name: str, order: float, make: Callable[[], Competitor]) -> None:
        """Build a competitor, warm it up and weigh it; one that cannot run or would take too long says so."""
        self.plan.watch(f"{self.length:,} tokens: {name}")
        cell = Cell(name, self.length)
        self.record.cells.append(cell)
        reason = "" if name == EXACT else self.too_much(name, order)
        if reason:
            cell.status, cell.note = "over budget", reason
            return
        try:
            runner, setting = make(), self.plan.setting
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
        """Why this cell is not worth its time or memory, foretold from the length before; empty if it is."""
        if self.spent > 1.5 * self.share:
            return f"the {self.share:.0f} s for {self.length:,} tokens were spent before its turn"
        before = self.record.cell(name, self.previous)
        if before is None:
            return ""
        if before.status == "over budget":
            return f"over budget already at {self.previous:,} tokens"
        grown = (self.length / self.previous) ** max(order, 1.0)
        foretold = ((before.forward_ms or 0.0) + (before.training_ms or 0.0)) / 1000 * grown
        allowed = PATIENCE * self.share / (len(self.plan.mechanisms) + 1) / (FEWEST_ROUNDS + 3)
        if foretold > allowed:
            return f"one pass would take about {foretold:.1f} s, more than the {allowed:.1f} s that the budget allows"
        bytes_before = max(before.training_bytes or 0, before.forward_bytes or 0) + (before.weight_bytes or 0)
        if bytes_before * grown > measure.memory_at_hand(self.plan.setting.device) / 2:
            return f"it would take about {bytes_before * grown / 2**30:.1f} GiB, more than half of the free memory"
        return ""

    def race(self) -> None:
        """Rounds in which everyone runs once in turn, until the time is spent; an interruption keeps whole rounds."""
        forward: dict[str, list[float]] = {name: [] for name in self.runners}
        training: dict[str, list[float]] = {name: [] for name in self.runners}
        setting, names, began = self.plan.setting, list(self.runners), self.spent
        try:
            for number in range(MOST_ROUNDS):
                self.plan.watch("")
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
    """Seconds of the second call of each pass; the first one pays for what is set up once."""
    measure.seconds(runner.forward, setting.device)
    forward = measure.seconds(runner.forward, setting.device)
    if not setting.backward:
        return forward, 0.0
    measure.seconds(runner.training, setting.device)
    return forward, measure.seconds(runner.training, setting.device)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def finish(plan: Plan, record: Record, status: str) -> None:
    """Note how it ended, and every cell that was not reached."""
    record.meta["status"] = status
    for length in plan.lengths:
        for name in [EXACT, *map(repr, plan.mechanisms)]:
            if record.cell(name, length) is None:
                record.cells.append(Cell(name, length))
    for cell in record.cells:
        if cell.status == "not reached":
            cell.note = f"the comparison was {status} before"
    record.meta["finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
