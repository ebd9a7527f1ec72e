"""Fair times: the competitors of a group are built, warmed up, measured, and then timed in turns, round by round."""

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
from fast_attention.mechanism import Unsupported

FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
SLOW = 0.1  # seconds: a call this long is warm after one
PASSES = FEWEST_ROUNDS + 3  # with the warm-up and the two that are watched for memory and operations
FEWEST_PASSES = 3  # one to count operations, one to warm up, one to time


@dataclass
class TimingGroup:
    """Competitors that are timed in the same rounds, at one length; those that do not fit the time are left out.

    Args:
        setting: What they are measured with.
        competitors: Their baselines, who are their own references, among them.
        record: Where the cells go.
        length: Tokens.
        seconds: Time for this group.
        watch: Told of every step.
        group: Its name, where not everybody is in the same rounds.
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
        """Whose times a competitor's are compared with; a baseline's are with its own."""
        return {each.name: each.reference for each in self.competitors}

    def run(self) -> None:
        """Measure everyone."""
        for competitor, reason in self.admitted():
            self.watch(f"{self.length:,} tokens: {competitor.name}")
            cell = Cell(competitor.name, self.length, group=self.group)
            self.record.cells.append(cell)
            if reason:
                cell.status, cell.note = "over budget", reason
            else:
                self.enter(competitor, cell)
        self.rounds()
        self.runners.clear()
        gc.collect()

    def admitted(self) -> list[tuple[Competitor, str]]:
        """The baselines, then all others, the quickest first, each with why it is left out, or nothing.

        Times and memory are foretold from the greatest length before; what is not known yet is tried.
        """
        expected = {
            each.name: foretold(self.record.cells, each.name, each.order, self.length) for each in self.competitors
        }
        ranked = sorted(self.competitors, key=lambda each: (each.name != each.reference, expected[each.name][0]))
        most, found, left = measure.memory_at_hand(self.setting.device) / 2, [], self.seconds
        for each in ranked:
            seconds, size = expected[each.name]
            if each.name == each.reference:
                found.append((each, ""))
                continue
            left -= seconds * PASSES
            if size > most:
                found.append((each, f"it would take about {size / 2**30:.1f} GiB, more than half of the free memory"))
            else:
                found.append((each, self.too_slow(seconds, left)))
        return found

    def too_slow(self, seconds: float, left: float) -> str:
        """Why a competitor is left out that takes so long a pass, or nothing.

        Args:
            seconds: Of a pass of each kind.
            left: What it and all quicker ones leave of the time.
        """
        many = f"about {seconds:.1f} s a pass: the quicker ones fill the {self.seconds:.0f} s for this length"
        return many if left < 0 else ""

    def enter(self, competitor: Competitor, cell: Cell) -> None:
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
            cell.status, cell.note = "refused", _line(error)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:  # a fault, not a refusal
            cell.status, cell.note = "failed", f"{type(error).__name__}: {_line(error)}"
        if is_baseline and cell.status == "failed":
            raise InputError(f"{competitor.name} itself fails at {self.length} tokens: {cell.note}")

    def prepare(self, passes: Passes, cell: Cell) -> tuple[float, float]:
        """Warm a competitor up, then measure its costs into its cell; seconds of one call of each pass."""
        found = [self.warm(run) for run in self.kinds(passes)]
        measure.costs(passes, self.setting, cell)
        return found[0], found[-1]

    def kinds(self, passes: Passes) -> list[measure.Run]:
        """The passes that are asked for: forward, and training if so."""
        return [passes.forward, passes.training] if self.setting.backward else [passes.forward]

    def warm(self, run: measure.Run, first: measure.Run | None = None) -> float:
        """Seconds of a call; of the second where the first, which pays for set-up, was short."""
        took = clock.seconds(first or run, self.setting.device)
        return clock.seconds(run, self.setting.device) if took < SLOW else took

    def rests(self, name: str, number: int) -> bool:
        """Whether a competitor sits out a round; once it has, it runs in no later one."""
        return False

    def enough(self, number: int, cost: float) -> bool:
        """Whether to stop before a round that will take ``cost`` seconds."""
        patience = 1.0 if number >= FEWEST_ROUNDS else 2.0
        return number > 0 and self.spent + cost > patience * self.seconds

    def rounds(self) -> None:
        """Rounds in which everyone runs once in turn, until the time is spent; an interruption keeps whole rounds."""
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
        mine, baseline = (name, self.length, self.group), self.baselines[name]
        cell = next(c for c in self.record.cells if (c.mechanism, c.length, c.group) == mine)
        for which, found in samples.items():
            if found[name] and found.get(baseline):
                summary = timing(found[name], found[baseline])
                cell.status, cell.rounds = "measured", max(cell.rounds, summary.rounds)
                for key, value in summary.of_a_cell().items():
                    setattr(cell, f"{which}_{key}", value)


class FamilyGroup(TimingGroup):
    """A group in which the slow run once rather than not at all, and the quick have the rounds of a median."""

    def too_slow(self, seconds: float, left: float) -> str:
        """As for every group; here each by itself must fit."""
        each = f"about {seconds:.1f} s a pass: too long for its group's {self.seconds:.0f} s at this length"
        return each if seconds * FEWEST_PASSES > self.seconds else ""

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
        """Once the slow have sat down, the others get their fewest rounds even where preparing took the time."""
        return number >= FEWEST_ROUNDS and self.spent + cost > self.seconds

    def prepare(self, passes: Passes, cell: Cell) -> tuple[float, float]:
        """Count operations and peak memory in the first call, which saves the slow one of theirs."""
        took, counts = [], []
        for run in self.kinds(passes):
            took.append(self.warm(run, lambda run=run: counts.append(counted(run, self.setting.device))))
        cell.operations, cell.forward_bytes = counts[0]
        if self.setting.backward:
            cell.training_operations, cell.training_bytes = counts[1]
        cell.weight_bytes = passes.weight_bytes
        return took[0], took[-1]


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
        """By the names that cells have for them, behind the pass."""
        times = {"ms": 1000 * self.median, "best_ms": 1000 * self.best}
        return {**times, "ratio": self.ratio, "best_ratio": self.best_ratio, "low": self.low, "high": self.high}


def timing(samples: list[float], reference: list[float]) -> Timing:
    """Summarise the samples of one competitor against the reference's samples of the same rounds."""
    shared = min(len(samples), len(reference))
    ratios = [mine / theirs for mine, theirs in zip(samples[:shared], reference[:shared], strict=True)]
    best = min(samples)
    low, _, high = statistics.quantiles([*ratios, *ratios[: shared == 1]], n=4, method="inclusive")
    middle = statistics.median(samples), statistics.median(ratios)
    return Timing(*middle, best, best / min(reference), shared, low, high)


def foretold(cells: list[Cell], name: str, order: float, length: int) -> tuple[float, float]:
    """Seconds of one pass of each kind, and bytes, at ``length``: from the greatest shorter one that was measured."""
    own = [c for c in cells if c.mechanism == name and c.length < length and c.forward_best_ms is not None]
    if not own:
        return 0.0, 0.0
    before = max(own, key=lambda cell: cell.length)
    grown = (length / before.length) ** max(order, 1.0)
    size = (before.peak_bytes or 0) + (before.weight_bytes or 0)
    return ((before.forward_best_ms or 0.0) + (before.training_best_ms or 0.0)) / 1000 * grown, size * grown


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
