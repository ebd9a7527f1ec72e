"""One length, one group: the lines to beat, ours and the peers run in turn, round by round."""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass
from functools import cached_property

from fast_attention import clock
from fast_attention.counting import count_operations, peak_bytes
from fast_attention.lab import measure
from fast_attention.lab.bench.entrants import Entrant
from fast_attention.lab.measure import Competitor, Run
from fast_attention.lab.race import FEWEST_ROUNDS, SLOW, Race
from fast_attention.lab.records import Cell

FEWEST_PASSES = 3  # one to count operations, one to warm up, one to time


@dataclass
class Heat(Race):
    """Entrants of one group at one length; ``mechanisms`` holds entrants, the lines to beat among them."""

    group: str = ""

    def run(self) -> None:
        """Measure everyone."""
        lines = {entrant.reference for entrant in self.mechanisms}
        for entrant in sorted(self.mechanisms, key=lambda e: e.name not in lines):
            reason = "" if entrant.name in lines else self.reason(entrant)
            if reason:
                self.watch(f"{self.length:,} tokens: {entrant.name}")
                self.record.cells.append(Cell(entrant.name, self.length, "over budget", reason))
            else:
                self.enter(entrant.name, lambda e=entrant: e.make(self.setting, self.length))
            self.record.cells[-1].group = self.group
        self.race()
        self.runners.clear()
        gc.collect()

    def reason(self, entrant: Entrant) -> str:
        """Why an entrant is not worth its time or memory, or nothing."""
        seconds, size = self.predicted(entrant.name, entrant.order)
        if size > measure.memory_at_hand(self.setting.device) / 2:
            return f"it would take about {size / 2**30:.1f} GiB, more than half of the free memory"
        if seconds * FEWEST_PASSES > self.share:
            return f"about {seconds:.1f} s a pass: too long for its group's {self.share:.0f} s at this length"
        return ""

    def against(self, name: str) -> str:
        """Exact attention in the same form and direction."""
        return next(entrant.reference for entrant in self.mechanisms if entrant.name == name)

    def cell(self, name: str) -> Cell | None:
        """This group's own: a line to beat has a cell in every group."""
        mine = (name, self.length, self.group)
        return next((c for c in self.record.cells if (c.mechanism, c.length, c.group) == mine), None)

    def rests(self, name: str, number: int) -> bool:
        """The slow run once, the quick and the lines to beat in every round."""
        return number > 0 and name != self.against(name) and name not in self.quick

    @cached_property
    def quick(self) -> set[str]:
        """The quickest, as many as have time for the fewest rounds that a median needs."""
        names = sorted((name for name in self.runners if name != self.against(name)), key=self.cost)
        ends = itertools.accumulate(FEWEST_ROUNDS * self.cost(name) for name in names)
        return {name for name, end in zip(names, ends, strict=True) if end <= self.share}

    def enough(self, number: int, cost: float) -> bool:
        """Once the slow have sat down, the others get their fewest rounds even where preparing took the time."""
        return number >= FEWEST_ROUNDS and self.spent + cost > self.share

    def prepare(self, runner: Competitor, cell: Cell) -> tuple[float, float]:
        """Count operations and peak memory while warming up; seconds of one call of each pass."""
        runs: list[Run] = [runner.forward, runner.training] if self.setting.backward else [runner.forward]
        took = []
        counts: list[tuple[int, int]] = []
        for run in runs:
            first = clock.seconds(lambda r=run: counts.append(self.count(r)), self.setting.device)
            took.append(clock.seconds(run, self.setting.device) if first < SLOW else first)
        cell.operations, cell.forward_bytes = counts[0]
        if self.setting.backward:
            cell.training_operations, cell.training_bytes = counts[1]
        cell.weight_bytes = runner.weight_bytes
        return took[0], took[-1]

    def count(self, run: Run) -> tuple[int, int]:
        """Operations and peak bytes of one call."""
        peaks: list[int] = []
        operations = count_operations(lambda: peaks.append(peak_bytes(run, self.setting.device)))
        return operations, peaks[0]
