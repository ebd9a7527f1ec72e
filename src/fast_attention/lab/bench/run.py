"""The benchmark itself: ceilings, checks, times, memory, decoding, ceilings again; whole at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fast_attention.lab.bench import ceilings, checks, decoding, memory
from fast_attention.lab.bench.competitors import OURS, Competitor, Direction, Peer, baselines, chosen
from fast_attention.lab.bench.record import Benchmark, Row, Weight, time_key
from fast_attention.lab.measure import Setting, memory_at_hand
from fast_attention.lab.records import Cell
from fast_attention.lab.surroundings import load_average, now
from fast_attention.lab.timing import MOST_ROUNDS, FamilyGroup, foretold

LONG = 2048  # tokens beyond which several families share a group, so that exact attention runs less often
FAMILIES_AT_ONCE, LONGER_AT_ONCE = 6, 10  # the latter beyond four times that length
SHORTEST = 2.0  # seconds
SET_UP, GUESS = 0.03, 1e-5  # seconds: per competitor; per token of one that was never measured
ONCE = 3 / 8  # what a single round takes with its preparation, of what several take
FRACTIONS = {"time": 0.75, "memory": 0.15, "decode": 0.1}  # of the budget
SHORTEST_WEIGHED = 1024  # tokens: below it, growth is the noise of pages


def _nothing(*_: object) -> None:
    return None


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
    watch: Callable[[str], None] = field(default=_nothing, compare=False)
    save: Callable[[], None] = field(default=_nothing, compare=False)

    @property
    def competitors(self) -> list[Competitor]:
        """Everybody but the baselines."""
        return chosen(self.mechanisms, self.direction, self.peers)

    def timed(self, competitor: Competitor, length: int) -> bool:
        """Whether it runs at a length."""
        return competitor.peer is None or self.peers_to is None or length <= self.peers_to

    @property
    def steps(self) -> int:
        """About how often ``watch`` will be called."""
        count = len(self.competitors)
        timed = len(self.lengths) * (count + 2 * len(self.mechanisms) + MOST_ROUNDS * len(self.mechanisms))
        weighed = len(self.memory_lengths) * count
        return count + timed + weighed + self.decode * len(self.mechanisms) * 10


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
        _weigh(plan, record, right, max(plan.budget * FRACTIONS["memory"], 10.0))
    if plan.decode:
        _decode(plan, record, right, max(plan.budget * FRACTIONS["decode"], 10.0))
    _measure_ceilings(plan, record, "after")


def _measure_ceilings(plan: Plan, record: Benchmark, when: str) -> None:
    plan.watch(f"ceilings {when}")
    found = ceilings.ceilings(plan.setting.device, plan.setting.dtype)
    record.ceilings.append({"when": when, "load_average": load_average(), **found})


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
            broken = laws.get(competitor.family)
            if broken is None:
                broken = laws[competitor.family] = checks.broken(competitor.mechanism, plan.setting.device)
            row.faults = [*checks.differences(competitor.mechanism, competitor.is_causal, plan.setting.device), *broken]
            row.check = "wrong" if row.faults else "right"
        if row.check not in ("wrong", "missing"):
            allowed.append(competitor)
    return allowed


def groups(competitors: list[Competitor], length: int) -> dict[str, list[Competitor]]:
    """Who runs in the same rounds: a family, or several at great lengths; each with the baselines it needs."""
    families: dict[str, list[Competitor]] = {}
    for competitor in competitors:
        families.setdefault(competitor.family, []).append(competitor)
    names = list(families)
    size = 1 if length <= LONG else FAMILIES_AT_ONCE if length <= 4 * LONG else LONGER_AT_ONCE
    found = {}
    for at in range(0, len(names), size):
        members = [competitor for name in names[at : at + size] for competitor in families[name]]
        found[" + ".join(names[at : at + size])] = [*baselines(members), *members]
    return found


def _times(plan: Plan, record: Benchmark, competitors: list[Competitor], budget: float) -> None:
    """Every group at every length, each within its part of the time; a group that is done is saved as such."""
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
    """How time is shared out: by what a pass of everybody will take, foretold from shorter lengths, and some set-up.

    Who is slower than the slowest baseline is taken to run once, and counts for less.
    """
    lines = {competitor.reference for competitor in group}
    seconds = {e.name: foretold(record.cells, e.name, e.order, length)[0] or GUESS * length for e in group}
    most = max(seconds[name] for name in lines)
    return sum(SET_UP + (each if each <= most else max(most, ONCE * each)) for each in seconds.values())


def _weigh(plan: Plan, record: Benchmark, competitors: list[Competitor], budget: float) -> None:
    """Peak memory of everybody, the baselines and ours first, the short lengths first."""
    everybody = [*baselines(competitors), *sorted(competitors, key=lambda e: e.owner != OURS)]
    todo = [(e, n) for n in plan.memory_lengths for e in everybody if f"memory {n} {e.name}" not in record.done]
    record.weights = [w for w in record.weights if f"memory {w.length} {w.name}" in record.done]
    until = time.perf_counter() + budget
    scales = memory.Scales(plan.setting, plan.threads, plan.mechanisms, bool(plan.peers))
    try:
        for competitor, length in todo:
            plan.watch(f"memory at {length:,} tokens: {competitor.name}")
            weight = Weight(competitor.name, length, essential_bytes=_essential(plan.setting, competitor, length))
            weight.note = _too_much(plan, record, competitor, length, until - time.perf_counter())
            patience = max(min(until - time.perf_counter(), budget / 4), 5.0)
            if not weight.note:
                weight.forward_bytes, weight.note = scales.weigh(competitor.name, length, False, patience)
            if not weight.note and plan.setting.backward:
                weight.training_bytes, weight.note = scales.weigh(competitor.name, length, True, patience)
            record.weights.append(weight)
            record.done.append(f"memory {length} {competitor.name}")
            plan.save()
    finally:
        scales.close()


def _too_much(plan: Plan, record: Benchmark, competitor: Competitor, length: int, left: float) -> str:
    """Why a measurement of memory is left out, foretold from the times and sizes already known, or nothing."""
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
    """Time per token of whatever decodes in a memory that does not grow."""
    fine = {competitor.family for competitor in competitors if competitor.owner == OURS}
    steady = [m for m in plan.mechanisms if decoding.steady(m) and repr(m) in fine]
    until = time.perf_counter() + budget
    for mechanism in steady:
        for batch in decoding.BATCHES:
            key = f"decode {batch} {mechanism!r}"
            if key in record.done:
                continue
            if time.perf_counter() > until:
                note = "over budget: the time for decoding was spent"
                record.steps += [decoding.Step(repr(mechanism), batch, at, note=note) for at in plan.positions]
                continue
            setting = replace(plan.setting, backward=False)
            record.steps += decoding.decoding(
                mechanism, batch, setting, plan.positions, patience=budget / 4, watch=plan.watch
            )
            record.done.append(key)
            plan.save()


def finish(plan: Plan, record: Benchmark, status: str) -> None:
    """Note how it ended, and every cell that was not reached or not allowed."""
    record.meta["status"] = status
    record.meta["finished"] = now()
    record.meta["load_average_after"] = load_average()
    for competitor in plan.competitors:
        row = record.row(competitor.name)
        for length in plan.lengths:
            cell = record.cell(competitor.name, length)
            if cell is None:
                cell = Cell(competitor.name, length)
                record.cells.append(cell)
            if row is not None and row.check in ("wrong", "missing"):
                cell.status = "refused"
                cell.note = f"no speed: {'; '.join(row.faults)}"
            elif not plan.timed(competitor, length):
                cell.note = f"peers run up to {plan.peers_to:,} tokens"
            elif cell.status == "not reached":
                cell.note = f"the benchmark was {status} before"
