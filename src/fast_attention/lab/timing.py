"""The timing kit: competitors are built, warmed up, and timed in turns, round by round."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fast_attention import clock
from fast_attention.counting import counted
from fast_attention.lab import measure
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import Competitor, Passes, Setting
from fast_attention.lab.records import Cell, Timed
from fast_attention.lab.refusals import failure, first_line
from fast_attention.mechanism import Unsupported

FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
SLOW = 0.1  # seconds: a call this long is warm after one
PASSES = FEWEST_ROUNDS + 3  # with the warm-up and the two that are watched for memory and operations
FEWEST_PASSES = 3  # one to count operations, one to warm up, one to time


@dataclass
class TimingGroup:
    """Times competitors in the same rounds, at one length; those that do not fit the time are left out.

    Args:
        setting: What they are measured with.
        competitors: All, with their baselines, which are their own references.
        record: Where the cells go.
        length: Tokens.
        seconds: Time for this group.
        watch: Called with every step.
        group: Its name, where not all competitors are in the same rounds.
    """

    setting: Setting
    competitors: Sequence[Competitor]
    record: Timed
    length: int
    seconds: float
    watch: Callable[[str], None]
    group: str = ""
    started: float = field(default_factory=time.perf_counter)
    runners: dict[str, Passes] = field(default_factory=dict)
    estimates: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        """Seconds since this group began."""
        return time.perf_counter() - self.started

    @cached_property
    def baselines(self) -> dict[str, str]:
        """The baseline of every competitor, with whose times its own are compared; a baseline is its own."""
        return {each.name: each.reference for each in self.competitors}

    def run(self) -> None:
        """Measure all competitors."""
        for competitor, reason in self.admitted():
            self.watch(f"{self.length:,} tokens: {competitor.name}")
            cell = Cell(competitor.name, self.length, group=self.group)
            self.record.cells.append(cell)
            if reason:
                cell.status, cell.note = "over budget", reason
            else:
                self.add(competitor, cell)
        self.rounds()
        self.runners.clear()
        gc.collect()

    def admitted(self) -> list[tuple[Competitor, str]]:
        """The baselines, then all others, the quickest first, each with why it is left out, or nothing.

        Times and memory are predicted from the greatest length before; what is not known yet is tried.
        """
        costs = {e.name: predicted(self.record.cells, e.name, e.order, self.length) for e in self.competitors}
        ranked = sorted(self.competitors, key=lambda each: (each.name != each.reference, costs[each.name][0]))
        most, admitted, left = measure.memory_at_hand(self.setting.device) / 2, [], self.seconds
        for each in ranked:
            (seconds, size), reason = costs[each.name], ""
            if each.name != each.reference:
                left -= seconds * PASSES
                reason = self.too_slow(seconds, left)
                if size > most:
                    reason = f"it would take about {size / 2**30:.1f} GiB, more than half of the free memory"
            admitted.append((each, reason))
        return admitted

    def too_slow(self, seconds: float, left: float) -> str:
        """Why a competitor is left out that takes so long a pass, or nothing.

        Args:
            seconds: Of a pass of each kind.
            left: What it and all quicker ones leave of the time.
        """
        many = f"about {seconds:.1f} s a pass: the quicker ones fill the {self.seconds:.0f} s for this length"
        return many if left < 0 else ""

    def add(self, competitor: Competitor, cell: Cell) -> None:
        """Build a competitor, warm it up and measure its costs; one that cannot run says so."""
        is_baseline = competitor.name == competitor.reference
        if self.spent > 1.5 * self.seconds and not is_baseline:
            cell.status = "over budget"
            cell.note = f"the {self.seconds:.0f} s for {self.length:,} tokens were spent before its turn"
            return
        try:
            passes = competitor.make(self.setting, self.length)
            self.estimates[competitor.name] = self.prepare(passes, cell)
            self.runners[competitor.name] = passes
        except Unsupported as error:
            cell.status, cell.note = "refused", first_line(error, 300)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:  # a fault, not a refusal
            cell.status, cell.note = "failed", failure(error, 300)
        if is_baseline and cell.status == "failed":
            raise InputError(f"{competitor.name} itself fails at {self.length} tokens: {cell.note}")

    def prepare(self, passes: Passes, cell: Cell) -> tuple[float, float]:
        """Warm a competitor up, then measure its costs into its cell; seconds of one call of each pass."""
        seconds = [self.warm(run) for run in self.kinds(passes)]
        measure.costs(passes, self.setting, cell)
        return seconds[0], seconds[-1]

    def kinds(self, passes: Passes) -> list[measure.Run]:
        """The passes that are asked for: forward, and training if so."""
        return [passes.forward, passes.training] if self.setting.backward else [passes.forward]

    def warm(self, run: measure.Run, first: measure.Run | None = None) -> float:
        """Seconds of a call; of the second where the first, which pays for set-up, was short."""
        seconds = clock.seconds(first or run, self.setting.device)
        return clock.seconds(run, self.setting.device) if seconds < SLOW else seconds

    def rests(self, name: str, number: int) -> bool:
        """Whether a competitor leaves a round out; once it has, it runs in no later one."""
        return False

    def enough(self, number: int, cost: float) -> bool:
        """Whether to stop before a round that will take ``cost`` seconds."""
        patience = 1.0 if number >= FEWEST_ROUNDS else 2.0
        return number > 0 and self.spent + cost > patience * self.seconds

    def rounds(self) -> None:
        """Rounds in which all run once in turn, until the time is spent; an interruption keeps complete rounds."""
        forward: dict[str, list[float]] = {name: [] for name in self.runners}
        training: dict[str, list[float]] = {name: [] for name in self.runners}
        device, names = self.setting.device, list(self.runners)
        try:
            for number in range(MOST_ROUNDS):
                self.watch(f"{self.length:,} tokens: round {number + 1}")
                turn = [*names[number % len(names) :], *names[: number % len(names)]]
                running = [name for name in turn if not self.rests(name, number)]
                if self.enough(number, sum(map(self.cost, running))):
                    break
                for name in running:
                    passes, (once, both) = self.runners[name], self.estimates[name]
                    forward[name].append(clock.seconds(passes.forward, device, clock.repeats_for(once)))
                    if self.setting.backward:
                        training[name].append(clock.seconds(passes.training, device, clock.repeats_for(both)))
        finally:
            for name in names:
                self.note(name, {"forward": forward, "training": training})

    def cost(self, name: str) -> float:
        """Seconds that a competitor will take for its part of a round."""
        passes = self.estimates[name] if self.setting.backward else self.estimates[name][:1]
        return sum(seconds * clock.repeats_for(seconds) for seconds in passes)

    def note(self, name: str, samples: dict[str, dict[str, list[float]]]) -> None:
        """Write the summary of a competitor's samples into its cell of this group."""
        key, baseline = (name, self.length, self.group), self.baselines[name]
        cell = next(c for c in self.record.cells if (c.mechanism, c.length, c.group) == key)
        for which, seconds in samples.items():
            if seconds[name] and seconds.get(baseline):
                summary = timing(seconds[name], seconds[baseline])
                cell.status, cell.rounds = "measured", max(cell.rounds, summary.rounds)
                for key, value in summary.of_a_cell().items():
                    setattr(cell, f"{which}_{key}", value)


class FamilyGroup(TimingGroup):
    """A timing group in which the slow run once rather than not at all, and the quick have the rounds of a median."""

    def too_slow(self, seconds: float, left: float) -> str:
        """Why a competitor is left out: each by itself must fit the time."""
        reason = f"about {seconds:.1f} s a pass: too long for its group's {self.seconds:.0f} s at this length"
        return reason if seconds * FEWEST_PASSES > self.seconds else ""

    def rests(self, name: str, number: int) -> bool:
        """The slow run once, the quick and the baselines in every round."""
        return number > 0 and name != self.baselines[name] and name not in self.quick

    @cached_property
    def quick(self) -> set[str]:
        """The quickest, as many as have time for the fewest rounds that a median needs."""
        names = sorted((name for name in self.runners if name != self.baselines[name]), key=self.cost)
        ends = itertools.accumulate(FEWEST_ROUNDS * self.cost(name) for name in names)
        return {name for name, end in zip(names, ends, strict=True) if end <= self.seconds}

    def enough(self, number: int, cost: float) -> bool:
        """Once the slow have run, the others get their fewest rounds even where preparing took the time."""
        return number >= FEWEST_ROUNDS and self.spent + cost > self.seconds

    def prepare(self, passes: Passes, cell: Cell) -> tuple[float, float]:
        """Count operations and peak memory in the first call, which saves the slow one of theirs."""
        seconds, counts = [], []
        for run in self.kinds(passes):
            seconds.append(self.warm(run, lambda run=run: counts.append(counted(run, self.setting.device))))
        cell.operations, cell.forward_bytes = counts[0]
        if self.setting.backward:
            cell.training_operations, cell.training_bytes = counts[1]
        cell.weight_bytes = passes.weight_bytes
        return seconds[0], seconds[-1]


@dataclass(frozen=True)
class Timing:
    """Seconds, median and least over the rounds; ratios are to the reference, the median of each round's."""

    median: float
    ratio: float
    best: float
    best_ratio: float
    rounds: int
    low: float  # the ratio's quartiles over the rounds
    high: float

    def of_a_cell(self) -> dict[str, float]:
        """The times by the names of a cell's fields, without the pass."""
        times = {"ms": 1000 * self.median, "best_ms": 1000 * self.best}
        return {**times, "ratio": self.ratio, "best_ratio": self.best_ratio, "low": self.low, "high": self.high}


def timing(samples: list[float], reference: list[float]) -> Timing:
    """Summarise the samples of one competitor against the reference's samples of the same rounds."""
    shared = min(len(samples), len(reference))
    ratios = [sample / baseline for sample, baseline in zip(samples[:shared], reference[:shared], strict=True)]
    best = min(samples)
    low, _, high = statistics.quantiles([*ratios, *ratios[: shared == 1]], n=4, method="inclusive")
    middle = statistics.median(samples), statistics.median(ratios)
    return Timing(*middle, best, best / min(reference), shared, low, high)


def predicted(cells: list[Cell], name: str, order: float, length: int) -> tuple[float, float]:
    """Seconds of one pass of each kind, and bytes, at ``length``: from the greatest shorter one that was measured."""
    shorter = [c for c in cells if c.mechanism == name and c.length < length and c.forward_best_ms is not None]
    if not shorter:
        return 0.0, 0.0
    before = max(shorter, key=lambda cell: cell.length)
    growth = (length / before.length) ** max(order, 1.0)
    size = (before.peak_bytes or 0) + (before.weight_bytes or 0)
    return ((before.forward_best_ms or 0.0) + (before.training_best_ms or 0.0)) / 1000 * growth, size * growth
