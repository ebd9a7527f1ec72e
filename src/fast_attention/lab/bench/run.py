"""The benchmark itself: ceilings, checks, times, memory, decoding, ceilings again; whole at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fast_attention.lab.bench import ceilings, checks, decoding, lineup, memory
from fast_attention.lab.bench.entrants import OURS, Entrant, Peer
from fast_attention.lab.bench.heat import Heat
from fast_attention.lab.bench.record import Benchmark, Row, Weight, time_key
from fast_attention.lab.measure import Setting, memory_at_hand
from fast_attention.lab.race import MOST_ROUNDS, foretold
from fast_attention.lab.records import Cell
from fast_attention.lab.surroundings import load_average, now

LONG = 2048  # tokens beyond which several families share a group, so that exact attention runs less often
FAMILIES_AT_ONCE, LONGER_AT_ONCE = 6, 10  # the latter beyond four times that length
SHORTEST_SHARE = 2.0  # seconds
SET_UP, GUESS = 0.03, 1e-5  # seconds: per entrant; per token of one that was never measured
ONCE = 3 / 8  # what a single round takes with its preparation, of what several take
SHARES = {"time": 0.75, "memory": 0.15, "decode": 0.1}  # of the budget
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
    direction: lineup.Direction
    budget: float  # seconds
    threads: int
    decode: bool = False
    peers_to: int | None = None  # tokens up to which peers are timed; None: all lengths
    positions: tuple[int, ...] = decoding.POSITIONS
    watch: Callable[[str], None] = field(default=_nothing, compare=False)
    save: Callable[[], None] = field(default=_nothing, compare=False)

    @property
    def entrants(self) -> list[Entrant]:
        """Everybody but the lines to beat."""
        return lineup.entrants(self.mechanisms, self.direction, self.peers)

    def timed(self, entrant: Entrant, length: int) -> bool:
        """Whether it runs at a length."""
        return entrant.peer is None or self.peers_to is None or length <= self.peers_to

    @property
    def steps(self) -> int:
        """About how often ``watch`` will be called."""
        count = len(self.entrants)
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
    spare = sum(share for name, share in SHARES.items() if not later.get(name, True))
    _times(plan, record, right, plan.budget * (SHARES["time"] + spare) - (time.perf_counter() - began))
    if plan.memory_lengths and memory.available(plan.setting.device):
        _weigh(plan, record, right, max(plan.budget * SHARES["memory"], 10.0))
    if plan.decode:
        _decode(plan, record, right, max(plan.budget * SHARES["decode"], 10.0))
    _measure_ceilings(plan, record, "after")


def _measure_ceilings(plan: Plan, record: Benchmark, when: str) -> None:
    plan.watch(f"ceilings {when}")
    found = ceilings.ceilings(plan.setting.device, plan.setting.dtype)
    record.ceilings.append({"when": when, "load_average": load_average(), **found})


def _check(plan: Plan, record: Benchmark) -> list[Entrant]:
    """The entrants that may run: ours if they are right, peers if they are there, whatever their faults."""
    allowed: list[Entrant] = []
    laws: dict[str, list[str]] = {}
    for entrant in plan.entrants:
        plan.watch(f"check: {entrant.name}")
        row = record.row(entrant.name)
        if row is None:
            row = Row.of(entrant)
            record.rows.append(row)
        if entrant.peer is not None:
            row.check, row.faults = checks.peer(entrant.peer)
            row.same = entrant.peer.same and not any(fault.startswith(checks.OTHER) for fault in row.faults)
        else:
            broken = laws.get(entrant.family)
            if broken is None:
                broken = laws[entrant.family] = checks.broken(entrant.mechanism, plan.setting.device)
            row.faults = [*checks.differences(entrant.mechanism, entrant.is_causal, plan.setting.device), *broken]
            row.check = "wrong" if row.faults else "right"
        if row.check not in ("wrong", "missing"):
            allowed.append(entrant)
    return allowed


def groups(entrants: list[Entrant], length: int) -> dict[str, list[Entrant]]:
    """Who runs in the same rounds: a family, or several at great lengths; each with the lines to beat it needs."""
    families: dict[str, list[Entrant]] = {}
    for entrant in entrants:
        families.setdefault(entrant.family, []).append(entrant)
    names = list(families)
    size = 1 if length <= LONG else FAMILIES_AT_ONCE if length <= 4 * LONG else LONGER_AT_ONCE
    found = {}
    for at in range(0, len(names), size):
        members = [entrant for name in names[at : at + size] for entrant in families[name]]
        found[" + ".join(names[at : at + size])] = [*lineup.references(members), *members]
    return found


def _times(plan: Plan, record: Benchmark, entrants: list[Entrant], budget: float) -> None:
    """Every group at every length, each within its share of the time; a group that is done is saved as such."""
    todo = [
        (length, name, group)
        for length in plan.lengths
        for name, group in groups([e for e in entrants if plan.timed(e, length)], length).items()
    ]
    todo = [job for job in todo if time_key(*job[:2]) not in record.done]
    left, before = max(budget, 1.0), None
    for number, (length, name, group) in enumerate(todo):
        started = time.perf_counter()
        if before not in (None, length):
            _measure_ceilings(plan, record, f"before {length:,} tokens")
        before = length
        ahead = sum(_effort(record, later, others) for later, _, others in todo[number:])
        share = max(left * _effort(record, length, group) / ahead, SHORTEST_SHARE)
        Heat(plan.setting, group, record, length, share, plan.watch, group=name).run()
        left = max(left - (time.perf_counter() - started), 1.0)
        record.done.append(time_key(length, name))
        plan.save()


def _effort(record: Benchmark, length: int, group: list[Entrant]) -> float:
    """How time is shared out: by what a pass of everybody will take, foretold from shorter lengths, and some set-up.

    Who is slower than the slowest line to beat is taken to run once, and counts for less.
    """
    lines = {entrant.reference for entrant in group}
    seconds = {e.name: foretold(record.cells, e.name, e.order, length)[0] or GUESS * length for e in group}
    most = max(seconds[name] for name in lines)
    return sum(SET_UP + (each if each <= most else max(most, ONCE * each)) for each in seconds.values())


def _weigh(plan: Plan, record: Benchmark, entrants: list[Entrant], budget: float) -> None:
    """Peak memory of everybody, the lines to beat and ours first, the short lengths first."""
    everybody = [*lineup.references(entrants), *sorted(entrants, key=lambda e: e.owner != OURS)]
    todo = [(e, n) for n in plan.memory_lengths for e in everybody if f"memory {n} {e.name}" not in record.done]
    record.weights = [w for w in record.weights if f"memory {w.length} {w.name}" in record.done]
    until = time.perf_counter() + budget
    scales = memory.Scales(plan.setting, plan.threads, plan.mechanisms, bool(plan.peers))
    try:
        for entrant, length in todo:
            plan.watch(f"memory at {length:,} tokens: {entrant.name}")
            weight = Weight(entrant.name, length, essential_bytes=_essential(plan.setting, entrant, length))
            weight.note = _too_much(plan, record, entrant, length, until - time.perf_counter())
            patience = max(min(until - time.perf_counter(), budget / 4), 5.0)
            if not weight.note:
                weight.forward_bytes, weight.note = scales.weigh(entrant.name, length, False, patience)
            if not weight.note and plan.setting.backward:
                weight.training_bytes, weight.note = scales.weigh(entrant.name, length, True, patience)
            record.weights.append(weight)
            record.done.append(f"memory {length} {entrant.name}")
            plan.save()
    finally:
        scales.close()


def _too_much(plan: Plan, record: Benchmark, entrant: Entrant, length: int, left: float) -> str:
    """Why a weighing is not worth it, foretold from the times and sizes already known, or nothing."""
    timed = [c for c in record.cells if c.mechanism == entrant.name and c.forward_best_ms and c.length <= length]
    if left <= 0:
        return "over budget: the time for memory was spent"
    if not timed:
        return ""
    before = max(timed, key=lambda cell: cell.length)
    ratio = length / before.length
    seconds = ratio**entrant.order * ((before.forward_best_ms or 0.0) * 2 + (before.training_best_ms or 0.0)) / 1000
    size = ratio**entrant.memory_order * ((before.peak_bytes or 0) + 2 * (before.weight_bytes or 0))
    if size > memory_at_hand(plan.setting.device) / 2:
        return f"over budget: about {size / 2**30:.1f} GiB"
    return f"over budget: about {seconds:.0f} s" if seconds > left else ""


def _essential(setting: Setting, entrant: Entrant, length: int) -> int:
    """Bytes of q, k, v and the output; of input and output where whole tokens go in."""
    tensors = 4 if entrant.kind == "core" else 2
    return tensors * setting.batch * length * setting.heads * setting.head_dim * setting.dtype.itemsize


def _decode(plan: Plan, record: Benchmark, entrants: list[Entrant], budget: float) -> None:
    """Time per token of whatever decodes in a memory that does not grow."""
    fine = {entrant.family for entrant in entrants if entrant.owner == OURS}
    chosen = [m for m in plan.mechanisms if decoding.steady(m) and repr(m) in fine]
    until = time.perf_counter() + budget
    for mechanism in chosen:
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
    for entrant in plan.entrants:
        row = record.row(entrant.name)
        for length in plan.lengths:
            cell = record.cell(entrant.name, length)
            if cell is None:
                cell = Cell(entrant.name, length)
                record.cells.append(cell)
            if row is not None and row.check in ("wrong", "missing"):
                cell.status = "refused"
                cell.note = f"no speed: {'; '.join(row.faults)}"
            elif not plan.timed(entrant, length):
                cell.note = f"peers run up to {plan.peers_to:,} tokens"
            elif cell.status == "not reached":
                cell.note = f"the benchmark was {status} before"
