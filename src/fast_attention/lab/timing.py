"""Times competitors in turns, round by round, after each was warmed up and its costs were counted."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fast_attention import clock
from fast_attention.counting import counted
from fast_attention.lab import environment, inputs, measure
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import Competitor, Passes, Setting
from fast_attention.lab.records import Cell, Timed, Times
from fast_attention.lab.refusals import failure, first_line
from fast_attention.mechanism import Unsupported

FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
PASSES = FEWEST_ROUNDS + 2  # with the one whose memory and operations are counted, and a warm-up


@contextmanager
def by_threads(asked: int | None) -> Iterator[Callable[[], list[str]]]:
    """Measure by so many threads, or by as many as are useful here; torch has its own number again at the end.

    Args:
        asked: Threads; None: no more than this process may use.

    Yields:
        A function that returns a sentence for each thing that a reader of the times must know.
    """
    own, usable = torch.get_num_threads(), environment.usable_cores()
    try:
        inputs.threads(asked or measure.useful_threads())
        others, words = environment.Others(), of_threads(own, asked, usable)
        yield lambda: [*words, *others.words()]
    finally:
        torch.set_num_threads(own)


def of_threads(own: int, asked: int | None, usable: int) -> list[str]:
    """A sentence about the number of threads that a reader of the times must know, or none.

    Args:
        own: torch's number of threads before.
        asked: The number that the user gave.
        usable: Cores that the process may use.
    """
    used, may = torch.get_num_threads(), f"this process may use {usable} core{'s' * (usable > 1)}"
    if used > usable:
        return [f"--threads {asked}, and {may}: threads wait for each other, and times are longer."]
    return [f"torch had {own} threads, and {may}: times are of {used}."] if own > usable else []


@dataclass
class TimingGroup:
    """Times competitors in the same rounds, at one length; those that do not fit the time are left out.

    Args:
        setting: What they are measured with.
        competitors: The baseline, then the others; the first have the first claim to the time.
        record: Where the cells go.
        length: Tokens.
        seconds: Time for this group.
        watch: Called with every step.
    """

    setting: Setting
    competitors: Sequence[Competitor]
    record: Timed
    length: int
    seconds: float
    watch: Callable[[str], None]
    started: float = field(default_factory=lambda: time.perf_counter())
    runners: dict[str, Passes] = field(default_factory=dict)
    estimates: dict[str, list[float]] = field(default_factory=dict)  # seconds of one call of each pass
    added: float = 0.0  # seconds until the last was added

    def run(self) -> None:
        """Measure all competitors."""
        for competitor in self.competitors:
            self.watch(f"{self.length:,} tokens: {competitor.name}")
            cell = Cell(competitor.name, self.length)
            self.record.cells.append(cell)
            is_baseline = competitor.name == competitor.reference
            if large := "" if is_baseline else self.too_large(competitor):
                cell.status, cell.note = "too large", large
            elif late := "" if is_baseline else self.too_late(competitor):
                cell.status, cell.note = "over budget", late
            else:
                self.add(competitor, cell)
        self.added = self.spent
        self.rounds()
        self.runners.clear()
        gc.collect()

    def too_large(self, competitor: Competitor) -> str:
        """Why a competitor's memory does not suffice, or nothing: predicted from the greatest length before."""
        _, size = predicted(self.record.cells, competitor.name, competitor.order, self.length)
        if size > measure.memory_at_hand(self.setting.device) / 2:
            return f"it would take about {size / 2**30:.1f} GiB, more than half of the free memory"
        return ""

    def too_late(self, competitor: Competitor) -> str:
        """Why the time left does not suffice, or nothing: predicted as memory is.

        What is not known yet is tried, if time is left.
        """
        seconds, _ = predicted(self.record.cells, competitor.name, competitor.order, self.length)
        if self.spent + self.promised + PASSES * seconds > self.seconds:
            pass_takes = f"about {seconds:.1f} s a pass: " if seconds else ""
            return f"{pass_takes}those before it fill the {self.seconds:.0f} s for this length"
        return ""

    @property
    def spent(self) -> float:
        """Seconds since this group began."""
        return time.perf_counter() - self.started

    @property
    def promised(self) -> float:
        """Seconds of the fewest rounds of those that were added."""
        return FEWEST_ROUNDS * sum(map(self.cost, self.runners))

    def enough(self, names: Sequence[str]) -> float:
        """Seconds that would have let in these competitors too: each as slow as the slowest that is known."""
        known = [sum(seconds) for seconds in self.estimates.values()]
        known += [predicted(self.record.cells, each.name, each.order, self.length)[0] for each in self.competitors]
        rounds = FEWEST_ROUNDS * sum(map(self.cost, self.estimates))
        return self.added + rounds + len(names) * PASSES * max(known, default=0.0)

    def cost(self, name: str) -> float:
        """Seconds that a competitor takes for its part of a round."""
        return sum(seconds * clock.repeats_for(seconds) for seconds in self.estimates[name])

    def add(self, competitor: Competitor, cell: Cell) -> None:
        """Build a competitor, warm it up and count its costs; one that cannot run says so."""
        try:
            passes = competitor.make(self.setting, self.length)
            self.estimates[competitor.name] = self.prepare(passes, cell)
            self.runners[competitor.name] = passes
        except Unsupported as error:
            cell.status, cell.note = "refused", first_line(error, 300)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:  # a fault, not a refusal
            cell.status, cell.note = "failed", failure(error, 300)
        if competitor.name == competitor.reference and cell.status == "failed":
            raise InputError(f"{competitor.name} itself fails at {self.length} tokens: {cell.note}")

    def prepare(self, passes: Passes, cell: Cell) -> list[float]:
        """Count operations and peak memory in the first call of each pass, into the cell; seconds of the second."""
        cell.operations, cell.forward_bytes = counted(passes.forward, self.setting.device)
        seconds = [clock.seconds(passes.forward, self.setting.device)]
        if self.setting.backward:
            cell.training_operations, cell.training_bytes = counted(passes.training, self.setting.device)
            seconds.append(clock.seconds(passes.training, self.setting.device))
        cell.weight_bytes = passes.weight_bytes
        return seconds

    def rounds(self) -> None:
        """Rounds in which all run once in turn, until the time is spent; an interruption keeps complete rounds."""
        names, device = list(self.runners), self.setting.device
        samples: dict[str, list[list[float]]] = {name: [[] for _ in self.estimates[name]] for name in names}
        try:
            for number in range(MOST_ROUNDS):
                self.watch(f"{self.length:,} tokens: round {number + 1}")
                patience = 1.0 if number >= FEWEST_ROUNDS else 1.5
                if number and self.spent + sum(map(self.cost, names)) > patience * self.seconds:
                    break
                for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                    runs = (self.runners[name].forward, self.runners[name].training)
                    for run, once, taken in zip(runs, self.estimates[name], samples[name], strict=False):
                        taken.append(clock.seconds(run, device, clock.repeats_for(once)))
        finally:
            for competitor in (each for each in self.competitors if each.name in samples):
                self.note(competitor, samples[competitor.name], samples[competitor.reference])

    def note(self, competitor: Competitor, samples: list[list[float]], baseline: list[list[float]]) -> None:
        """Write the summary of a competitor's samples into its cell."""
        cell = next(c for c in self.record.cells if (c.mechanism, c.length) == (competitor.name, self.length))
        for which, ours, theirs in zip(("forward", "training"), samples, baseline, strict=False):
            if ours and theirs:
                times, rounds = timing(ours, theirs)
                cell.status, cell.rounds = "measured", max(cell.rounds, rounds)
                for key, value in times._asdict().items():
                    setattr(cell, f"{which}_{key}", value)


def timing(samples: list[float], reference: list[float]) -> tuple[Times, int]:
    """Summarise the seconds of one competitor against the reference's of the same rounds, whose number it returns."""
    shared = min(len(samples), len(reference))
    ratios = [sample / baseline for sample, baseline in zip(samples[:shared], reference[:shared], strict=True)]
    low, middle, high = statistics.quantiles([*ratios, *ratios[: shared == 1]], n=4, method="inclusive")
    best = min(samples)
    return Times(1000 * statistics.median(samples), 1000 * best, middle, best / min(reference), low, high), shared


def predicted(cells: list[Cell], name: str, order: float, length: int) -> tuple[float, float]:
    """Seconds of one pass of each kind, and bytes, at ``length``: from the greatest shorter one that was measured."""
    shorter = [c for c in cells if c.mechanism == name and c.length < length and c.forward_best_ms is not None]
    if not shorter:
        return 0.0, 0.0
    before = max(shorter, key=lambda cell: cell.length)
    growth = (length / before.length) ** max(order, 1.0)
    size = (before.peak_bytes or 0) + (before.weight_bytes or 0)
    return ((before.forward_best_ms or 0.0) + (before.training_best_ms or 0.0)) / 1000 * growth, size * growth
