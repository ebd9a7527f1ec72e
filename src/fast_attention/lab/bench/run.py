"""Runs a benchmark: ceilings, checks, times, memory, decoding, ceilings again; its record is valid at any moment."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fast_attention.lab.bench import ceilings, checks, decoding, memory
from fast_attention.lab.bench.competitors import OURS, Competitor, Direction, Peer, baselines, chosen
from fast_attention.lab.bench.record import Benchmark, PeakMemory, Row, time_key
from fast_attention.lab.measure import Setting, memory_at_hand
from fast_attention.lab.progress import nothing
from fast_attention.lab.surroundings import load_average
from fast_attention.lab.timing import MOST_ROUNDS, FamilyGroup, predicted

LONG = 2048  # tokens beyond which several families share a group, so that exact attention runs less often
FAMILIES_AT_ONCE, LONGER_AT_ONCE = 6, 10  # the latter beyond four times that length
SHORTEST = 2.0  # seconds
SET_UP, GUESS = 0.03, 1e-5  # seconds: per competitor; per token of one that was never measured
ONCE = 3 / 8  # what a single round takes with its preparation, of what several take
FRACTIONS = {"time": 0.75, "memory": 0.15, "decode": 0.1}  # of the budget
SHORTEST_MEMORY = 1024  # tokens: below it, growth is the noise of pages


@dataclass(frozen=True)
class Plan:
    """What to run and how long that may take."""

    mechanisms: list[Any]
    peers: list[Peer]
    lengths: list[int]
    memory_lengths: list[int]
    setting: Setting
    direction: Direction
    budget: float  # seconds
    threads: int
    decode: bool = False
    peers_to: int | None = None  # tokens up to which peers are timed; None: all lengths
    positions: tuple[int, ...] = decoding.POSITIONS
    watch: Callable[[str], None] = field(default=nothing, compare=False)
    save: Callable[[], None] = field(default=nothing, compare=False)

    @property
    def competitors(self) -> list[Competitor]:
        """All but the baselines."""
        return chosen(self.mechanisms, self.direction, self.peers)

    def timed(self, competitor: Competitor, length: int) -> bool:
        """Whether it runs at a length."""
        return competitor.peer is None or self.peers_to is None or length <= self.peers_to

    @property
    def steps(self) -> int:
        """About how often ``watch`` will be called."""
        count = len(self.competitors)
        timed = len(self.lengths) * (count + 2 * len(self.mechanisms) + MOST_ROUNDS * len(self.mechanisms))
        measured = len(self.memory_lengths) * count
        return count + timed + measured + self.decode * len(self.mechanisms) * 10


def bench(plan: Plan, record: Benchmark) -> None:
    """Fill ``record``. Interrupted, it holds what was measured until then."""
    began = time.perf_counter()
    _measure_ceilings(plan, record, "before")
    right = _check(plan, record)
    plan.save()
    if plan.memory_lengths and not memory.available(plan.setting.device):
        record.meta["memory"] = "the allocator's peak, in the timed process: resident memory tells nothing here"
    later = {"memory": bool(plan.memory_lengths), "decode": plan.decode}
    spare = sum(fraction for name, fraction in FRACTIONS.items() if not later.get(name, True))
    _times(plan, record, right, plan.budget * (FRACTIONS["time"] + spare) - (time.perf_counter() - began))
    if plan.memory_lengths and memory.available(plan.setting.device):
        _memory(plan, record, right, max(plan.budget * FRACTIONS["memory"], 10.0))
    if plan.decode:
        _decode(plan, record, right, max(plan.budget * FRACTIONS["decode"], 10.0))
    _measure_ceilings(plan, record, "after")


def _measure_ceilings(plan: Plan, record: Benchmark, when: str) -> None:
    plan.watch(f"ceilings {when}")
    limits = ceilings.ceilings(plan.setting.device, plan.setting.dtype)
    record.ceilings.append({"when": when, "load_average": load_average(), **limits})


def _check(plan: Plan, record: Benchmark) -> list[Competitor]:
    """The competitors that may run: ours if they are right, peers if they are there, whatever their faults."""
    allowed: list[Competitor] = []
    laws: dict[str, list[str]] = {}
    for competitor in plan.competitors:
        plan.watch(f"check: {competitor.name}")
        row = record.row(competitor.name)
        if row is None:
            row = Row.of(competitor)
            record.rows.append(row)
        if competitor.peer is not None:
            row.check, row.faults = checks.peer(competitor.peer)
            row.same = competitor.peer.same and not any(fault.startswith(checks.OTHER) for fault in row.faults)
        else:
            mechanism, device = competitor.mechanism, plan.setting.device
            if competitor.family not in laws:
                laws[competitor.family] = checks.broken(mechanism, device)
            row.faults = [*checks.differences(mechanism, competitor.is_causal, device), *laws[competitor.family]]
            row.check = "wrong" if row.faults else "right"
        if row.check not in ("wrong", "missing"):
            allowed.append(competitor)
    return allowed


def groups(competitors: list[Competitor], length: int) -> dict[str, list[Competitor]]:
    """The competitors of each timing group: a family, or several at great lengths; each with the baselines it needs."""
    families: dict[str, list[Competitor]] = {}
    for competitor in competitors:
        families.setdefault(competitor.family, []).append(competitor)
    names = list(families)
    size = 1 if length <= LONG else FAMILIES_AT_ONCE if length <= 4 * LONG else LONGER_AT_ONCE
    timed = {}
    for at in range(0, len(names), size):
        members = [competitor for name in names[at : at + size] for competitor in families[name]]
        timed[" + ".join(names[at : at + size])] = [*baselines(members), *members]
    return timed


def _times(plan: Plan, record: Benchmark, competitors: list[Competitor], budget: float) -> None:
    """Time every group at every length, each within its part of the time; a complete group is saved as such."""
    todo = [
        (length, name, group)
        for length in plan.lengths
        for name, group in groups([e for e in competitors if plan.timed(e, length)], length).items()
    ]
    todo = [job for job in todo if time_key(*job[:2]) not in record.done]
    left, before = max(budget, 1.0), None
    for number, (length, name, group) in enumerate(todo):
        started = time.perf_counter()
        if before not in (None, length):
            _measure_ceilings(plan, record, f"before {length:,} tokens")
        before = length
        ahead = sum(_effort(record, later, others) for later, _, others in todo[number:])
        seconds = max(left * _effort(record, length, group) / ahead, SHORTEST)
        FamilyGroup(plan.setting, group, record, length, seconds, plan.watch, group=name).run()
        left = max(left - (time.perf_counter() - started), 1.0)
        record.done.append(time_key(length, name))
        plan.save()


def _effort(record: Benchmark, length: int, group: list[Competitor]) -> float:
    """The weight of a group when time is divided: the predicted times of a pass of all competitors, and some set-up.

    A competitor slower than the slowest baseline is expected to run once, and counts for less.
    """
    seconds = {e.name: predicted(record.cells, e.name, e.order, length)[0] or GUESS * length for e in group}
    most = max(seconds[competitor.reference] for competitor in group)
    return sum(SET_UP + (each if each <= most else max(most, ONCE * each)) for each in seconds.values())


def _memory(plan: Plan, record: Benchmark, competitors: list[Competitor], budget: float) -> None:
    """Peak memory of all, the baselines and ours first, the short lengths first."""
    ordered = [*baselines(competitors), *sorted(competitors, key=lambda e: e.owner != OURS)]
    todo = [(e, n) for n in plan.memory_lengths for e in ordered if f"memory {n} {e.name}" not in record.done]
    record.memory = [p for p in record.memory if f"memory {p.length} {p.name}" in record.done]
    until = time.perf_counter() + budget
    meter = memory.Meter(plan.setting, plan.threads, plan.mechanisms, bool(plan.peers))
    try:
        for competitor, length in todo:
            plan.watch(f"memory at {length:,} tokens: {competitor.name}")
            peak = PeakMemory(competitor.name, length, essential_bytes=_essential(plan.setting, competitor, length))
            peak.note = _too_much(plan, record, competitor, length, until - time.perf_counter())
            patience = max(min(until - time.perf_counter(), budget / 4), 5.0)
            if not peak.note:
                peak.forward_bytes, peak.note = meter.measure(competitor.name, length, False, patience)
            if not peak.note and plan.setting.backward:
                peak.training_bytes, peak.note = meter.measure(competitor.name, length, True, patience)
            record.memory.append(peak)
            record.done.append(f"memory {length} {competitor.name}")
            plan.save()
    finally:
        meter.close()


def _too_much(plan: Plan, record: Benchmark, competitor: Competitor, length: int, left: float) -> str:
    """Why a measurement of memory is left out, predicted from the times and sizes already known, or nothing."""
    timed = [c for c in record.cells if c.mechanism == competitor.name and c.forward_best_ms and c.length <= length]
    if left <= 0:
        return "over budget: the time for memory was spent"
    if not timed:
        return ""
    before = max(timed, key=lambda cell: cell.length)
    ratio = length / before.length
    seconds = ratio**competitor.order * ((before.forward_best_ms or 0.0) * 2 + (before.training_best_ms or 0.0)) / 1000
    size = ratio**competitor.memory_order * ((before.peak_bytes or 0) + 2 * (before.weight_bytes or 0))
    if size > memory_at_hand(plan.setting.device) / 2:
        return f"over budget: about {size / 2**30:.1f} GiB"
    return f"over budget: about {seconds:.0f} s" if seconds > left else ""


def _essential(setting: Setting, competitor: Competitor, length: int) -> int:
    """Bytes of q, k, v and the output; of input and output where whole tokens go in."""
    tensors = 4 if competitor.kind == "core" else 2
    return tensors * setting.batch * length * setting.heads * setting.head_dim * setting.dtype.itemsize


def _decode(plan: Plan, record: Benchmark, competitors: list[Competitor], budget: float) -> None:
    """Time decoding, per token, of all mechanisms whose state does not grow."""
    right = {competitor.family for competitor in competitors if competitor.owner == OURS}
    mechanisms = [m for m in plan.mechanisms if decoding.bounded_state(m) and repr(m) in right]
    setting, until = replace(plan.setting, backward=False), time.perf_counter() + budget
    for mechanism, batch in itertools.product(mechanisms, decoding.BATCHES):
        key = f"decode {batch} {mechanism!r}"
        if key in record.done:
            continue
        if time.perf_counter() > until:
            note = "over budget: the time for decoding was spent"
            record.steps += [decoding.Step(repr(mechanism), batch, at, note=note) for at in plan.positions]
            continue
        steps = decoding.decoding(mechanism, batch, setting, plan.positions, patience=budget / 4, watch=plan.watch)
        record.steps += steps
        record.done.append(key)
        plan.save()


def finish(plan: Plan, record: Benchmark, status: str) -> None:
    """Note how it ended, and every cell that was not reached or not allowed."""
    record.finish(status)
    competitors = {competitor.name: competitor for competitor in plan.competitors}
    record.not_reached(competitors, plan.lengths, f"the benchmark was {status} before")
    for competitor, length in itertools.product(competitors.values(), plan.lengths):
        row, cell = record.row(competitor.name), record.cell(competitor.name, length)
        assert cell is not None
        if row is not None and row.check in ("wrong", "missing"):
            cell.status, cell.note = "refused", f"no speed: {'; '.join(row.faults)}"
        elif not plan.timed(competitor, length):
            cell.note = f"peers run up to {plan.peers_to:,} tokens"
