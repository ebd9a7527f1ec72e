"""Time, memory and decoding of every mechanism beside exact attention and published packages: ``make bench``.

    python -m benchmarks.bench --mechanisms LinearAttention "Local(window=64)" --lengths 512 4096
    python -m benchmarks.bench --vs-peers --decode --memory-lengths 4096 16384 --patience 5

First the machine's ceilings, then a check of each competitor (what is wrong gets no speed), then times in turns, peak
memory in fresh processes, single tokens of decoding, and the ceilings again. The record is written after every step;
``--resume`` measures what it lacks. benchmarks/README.md says what each figure means.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks import checks, memory
from benchmarks.competitors import OURS, TORCH, Competitor, baselines, chosen, default_mechanisms
from experiments.arguments import Arguments, YesNo
from fast_attention import clock, keep_memory
from fast_attention.counting import counted
from fast_attention.lab import inputs, measure, tables
from fast_attention.lab.environment import begun, load_average
from fast_attention.lab.measure import Setting, timing
from fast_attention.lab.records import PASSES, Cell, Pass, Timed
from fast_attention.lab.refusals import InputError, failure, first_line
from fast_attention.lab.tables import Row as TableRow
from fast_attention.lab.tables import Table, Value, bytes_of, fixed, milliseconds, say, show
from fast_attention.mechanism import Attention, Shape, Unsupported
from fast_attention.nn.bound import Bound

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
POSITIONS, BATCHES, STEPS, PREFILL = (256, 1024, 4096, 16384, 65536), (1, 8), 25, 4096  # of decoding
FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
MANY = 10  # times its patience may a group take before it stops after the fewest rounds, and other measurements
LONG, TOGETHER, LONGER = 2048, 6, 10  # beyond so many tokens families share a group, still more beyond 4 times that
SHORTEST_MEMORY = 1024  # tokens: below it, growth is the noise of pages
Watch = Callable[[str], None]


@dataclass
class Row:
    """A competitor in the record, with the result of its check. ``faults`` of a peer are its own."""

    name: str
    family: str
    kind: str
    is_causal: bool
    owner: str
    reference: str
    note: str = ""
    check: str = "not checked"  # or right, wrong, faulty (a peer's broken law), missing (not installed)
    faults: list[str] = field(default_factory=list)
    same: bool = True  # a peer that computes the same function as ours, by design and by its check


@dataclass
class PeakMemory:
    """Peak memory of one pass in a fresh process: the growth of its resident set beyond weights and inputs."""

    name: str
    length: int
    forward_bytes: int | None = None
    training_bytes: int | None = None
    essential_bytes: int = 0  # of q, k, v and the output (of input and output where whole tokens go in)
    note: str = ""


@dataclass
class Step:
    """Decoding one token at a position; seconds are medians over the rounds."""

    name: str
    batch: int
    position: int
    seconds: float | None = None
    state_bytes: int | None = None
    note: str = ""


@dataclass
class Benchmark(Timed):
    """The record of one benchmark."""

    kind, noun, keys = "bench", "benchmark", {"memory": "weights"}
    same = ("heads", "head_dim", "batch", "dtype", "device", "hardware", "threads", "torch", "commit", "backward")
    data = "bench.json"

    rows: list[Row] = field(default_factory=list)
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    memory: list[PeakMemory] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # what need not run again when resumed
    summary: dict[str, Any] = field(default_factory=dict)  # what the figures say, written out for readers of the JSON

    def row(self, name: str) -> Row | None:
        """The row of a name."""
        return next((row for row in self.rows if row.name == name), None)

    @classmethod
    def resume(cls, path: Path, meta: dict[str, Any]) -> Self:
        """Read a record to resume it; groups that were interrupted are dropped."""
        record = super().resume(path, meta)
        record.cells = [cell for cell in record.cells if f"time {cell.length} {cell.group}" in record.done]
        record.memory = [peak for peak in record.memory if f"memory {peak.length} {peak.name}" in record.done]
        return record


@dataclass(frozen=True)
class Plan:
    """What to run, and how long a pass may take."""

    competitors: list[Competitor]
    lengths: list[int]
    memory_lengths: list[int]
    setting: Setting
    patience: float  # seconds of a pass, forward and backward: what takes longer is left out
    decode: bool = False
    peers_to: int | None = None  # tokens up to which peers are timed; None: all lengths
    watch: Watch = field(default=lambda words: None, compare=False)
    save: Callable[[], None] = field(default=lambda: None, compare=False)

    def timed(self, competitor: Competitor, length: int) -> bool:
        """Whether it runs at a length."""
        return competitor.peer is None or self.peers_to is None or length <= self.peers_to


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a state."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(state_bytes(part) for part in state) if isinstance(state, tuple | list) else 0


def bench(plan: Plan, record: Benchmark) -> None:
    """Fill ``record``. Interrupted, it holds what was measured until then."""
    _ceilings(plan, record, "before")
    allowed = _checked(plan, record)
    plan.save()
    _times(plan, record, allowed)
    if plan.memory_lengths and memory.available(plan.setting.device):
        _memory(plan, record, allowed)
    elif plan.memory_lengths:
        record.meta["memory"] = "the allocator's peak, in the timed process: resident memory tells nothing here"
    if plan.decode:
        _decode(plan, record, allowed)
    _ceilings(plan, record, "after")


# The machine


def _ceilings(plan: Plan, record: Benchmark, when: str) -> None:
    plan.watch(f"ceilings {when}")
    record.ceilings.append(
        {"when": when, "load_average": load_average(), **ceilings(plan.setting.device, plan.setting.dtype)}
    )


@torch.no_grad()
def ceilings(device: torch.device, dtype: torch.dtype, patience: float = 0.4) -> dict[str, float]:
    """Measure the highest rates that the machine reaches now, ``patience`` seconds for each.

    Returns:
        ``gemm_gflops`` (2048 x 2048 x 2048), ``bmm_gflops`` (256 products of 128 x 64 x 128), ``exp_gelem_s`` (half a
        million numbers in place), ``copy_gb_s`` (64 MiB, read and written bytes together), ``fresh_gb_s`` (64 MiB
        allocated and written: where a CPU's system hands out such memory page by page, ``keep_memory`` not called, a
        tensor at a great length can cost more to get than to compute) and ``empty_us`` (an operation on one number:
        what a call costs).
    """
    a, b = (torch.randn(2048, 2048).to(device, dtype) for _ in range(2))
    c = torch.empty_like(a)
    small, other = (torch.randn(256, *size).to(device, dtype) for size in ((128, 64), (64, 128)))
    x = torch.rand(2**19, device=device).to(dtype)
    e = torch.empty_like(x)
    source = torch.ones(2**24, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)
    operations: dict[str, tuple[Callable[[], Any], float]] = {
        "gemm_gflops": (lambda: torch.mm(a, b, out=c), 2 * 2048**3 / 1e9),
        "bmm_gflops": (lambda: torch.bmm(small, other), 256 * 2 * 128 * 64 * 128 / 1e9),
        "exp_gelem_s": (lambda: torch.exp(x, out=e), x.numel() / 1e9),
        "copy_gb_s": (lambda: target.copy_(source), 2 * source.nbytes / 1e9),
        "fresh_gb_s": (lambda: torch.ones_like(source), source.nbytes / 1e9),
    }
    rates = {name: work / _least(run, device, patience) for name, (run, work) in operations.items()}
    return {**rates, "empty_us": 1e6 * _least(lambda: one.add_(0.0), device, patience)}


def _least(run: Callable[[], Any], device: torch.device, patience: float) -> float:
    """The shortest time of one call, of as many as ``patience`` seconds allow and three at least."""
    repeats = clock.repeats_for(clock.seconds(run, device))
    times, began = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < patience:
        times.append(clock.seconds(run, device, repeats))
    return min(times)


# Checks


def _checked(plan: Plan, record: Benchmark) -> list[Competitor]:
    """The competitors that may run: ours if they are right, peers if they are there, whatever their faults."""
    allowed: list[Competitor] = []
    laws: dict[str, list[str]] = {}
    for each in plan.competitors:
        plan.watch(f"check: {each.name}")
        row = record.row(each.name)
        if row is None:
            row = Row(each.name, each.family, each.kind, each.is_causal, each.owner, each.reference)
            record.rows.append(row)
        if each.peer is not None:
            row.note = each.peer.note
            row.check, row.faults = checks.peer(each.peer)
            row.same = each.peer.same and not any(fault.startswith(checks.OTHER) for fault in row.faults)
        else:
            if each.family not in laws:
                laws[each.family] = checks.ours(each.mechanism, plan.setting.device)
            row.faults = laws[each.family]
            row.check = "wrong" if row.faults else "right"
        if row.check not in ("wrong", "missing"):
            allowed.append(each)
    return allowed


# Times


def groups(competitors: list[Competitor], length: int) -> dict[str, list[Competitor]]:
    """The competitors of each timing group: a family, or several at great lengths; each with the baselines it needs."""
    families: dict[str, list[Competitor]] = {}
    for competitor in competitors:
        families.setdefault(competitor.family, []).append(competitor)
    names = list(families)
    size = 1 if length <= LONG else TOGETHER if length <= 4 * LONG else LONGER
    timed = {}
    for at in range(0, len(names), size):
        members = [competitor for name in names[at : at + size] for competitor in families[name]]
        timed[" + ".join(names[at : at + size])] = [*baselines(members), *members]
    return timed


def _times(plan: Plan, record: Benchmark, competitors: list[Competitor]) -> None:
    """Time every group at every length; a complete group is saved as such."""
    for length in plan.lengths:
        if length != plan.lengths[0]:
            _ceilings(plan, record, f"before {length:,} tokens")
        for name, group in groups([e for e in competitors if plan.timed(e, length)], length).items():
            if f"time {length} {name}" not in record.done:
                time_group(plan, record, length, name, group)
                record.done.append(f"time {length} {name}")
                plan.save()


def time_group(plan: Plan, record: Benchmark, length: int, name: str, group: list[Competitor]) -> None:
    """Time competitors in turns, round by round."""
    device, began = plan.setting.device, time.perf_counter()
    cells = {each.name: Cell(each.name, length, group=name) for each in group}
    record.cells += cells.values()
    runs: dict[tuple[str, Pass], tuple[Callable[[], Any], int]] = {}
    for each, cell in zip(group, cells.values(), strict=True):
        plan.watch(f"{length:,} tokens: {each.name}")
        try:
            cell.note = too_much(plan, record, each, length)
            if cell.note:
                cell.status = "over budget"
            else:
                runs |= {(each.name, which): run for which, run in _prepared(each, plan.setting, length, cell).items()}
        except Unsupported as error:
            cell.status, cell.note = "refused", first_line(error, 300)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            cell.status, cell.note = "failed", failure(error, 300)
        if each.name == each.reference and cell.status == "failed":
            raise InputError(f"{each.name} itself fails at {length} tokens: {cell.note}")
    samples: dict[tuple[str, Pass], list[float]] = {key: [] for key in runs}
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and time.perf_counter() - began > MANY * plan.patience:
            break
        plan.watch(f"{length:,} tokens: round {number + 1}")
        first = number % len(runs) if runs else 0
        for key in [*runs][first:] + [*runs][:first]:
            samples[key].append(clock.seconds(runs[key][0], device, runs[key][1]))
    for each, which in itertools.product(group, PASSES):
        theirs, exact = samples.get((each.name, which)), samples.get((each.reference, which))
        if theirs and exact:
            cell, (held, rounds) = cells[each.name], timing(theirs, exact)
            cell.status, cell.rounds = "measured", rounds
            for key, value in held._asdict().items():
                setattr(cell, f"{which}_{key}", value)


def too_much(plan: Plan, record: Benchmark, competitor: Competitor, length: int) -> str:
    """Why a competitor is left out at a length, predicted from the greatest shorter one, or nothing."""
    cells = [c for c in record.cells if c.mechanism == competitor.name and c.length < length and c.forward_best_ms]
    if not cells:
        return ""
    before = max(cells, key=lambda cell: cell.length)
    ratio = length / before.length
    seconds = ((before.forward_best_ms or 0.0) + (before.training_best_ms or 0.0)) / 1000 * ratio**competitor.order
    size = ((before.peak_bytes or 0) + (before.weight_bytes or 0)) * ratio**competitor.memory_order
    if size > measure.memory_at_hand(plan.setting.device) / 2:
        return f"it would take about {size / 2**30:.1f} GiB, more than half of the free memory"
    return f"about {seconds:.1f} s a pass: more than {plan.patience:g} s" if seconds > plan.patience else ""


def _prepared(
    competitor: Competitor, setting: Setting, length: int, cell: Cell
) -> dict[Pass, tuple[Callable[[], Any], int]]:
    """Every pass of a competitor, warm, with the calls that make a sample; its operations and bytes, into its cell."""
    passes = competitor.make(setting, length)
    cell.weight_bytes = passes.weight_bytes
    runs: dict[Pass, tuple[Callable[[], Any], int]] = {}
    for which in PASSES if setting.backward else PASSES[:1]:
        run: Callable[[], Any] = getattr(passes, which)
        operations, size = counted(run, setting.device)
        setattr(cell, "operations" if which == "forward" else "training_operations", operations)
        setattr(cell, f"{which}_bytes", size)
        runs[which] = run, clock.repeats_for(clock.seconds(run, setting.device))
    return runs


# Memory


def _memory(plan: Plan, record: Benchmark, competitors: list[Competitor]) -> None:
    """Peak memory of all, the baselines and ours first, the short lengths first."""
    ordered = [*baselines(competitors), *sorted(competitors, key=lambda e: e.owner != OURS)]
    setting = plan.setting
    for length, each in itertools.product(plan.memory_lengths, ordered):
        if f"memory {length} {each.name}" in record.done:
            continue
        plan.watch(f"memory at {length:,} tokens: {each.name}")
        tensors = 4 if each.kind == "core" else 2
        essential = tensors * setting.batch * length * setting.heads * setting.head_dim * setting.dtype.itemsize
        peak = PeakMemory(each.name, length, essential_bytes=essential, note=too_much(plan, record, each, length))
        for which in PASSES if setting.backward else PASSES[:1]:
            if not peak.note:
                one = replace(setting, backward=which == "training")
                size, peak.note = memory.measured(each, one, length, MANY * plan.patience)
                setattr(peak, f"{which}_bytes", size)
        record.memory.append(peak)
        record.done.append(f"memory {length} {each.name}")
        plan.save()


# Decoding


def _decode(plan: Plan, record: Benchmark, competitors: list[Competitor]) -> None:
    """Time decoding, token by token, of all mechanisms whose state does not grow."""
    mechanisms = {each.family: each.mechanism for each in competitors if each.owner == OURS}.values()
    for mechanism, batch in itertools.product(filter(bounded_state, mechanisms), BATCHES):
        key = f"decode {batch} {mechanism!r}"
        if key not in record.done:
            record.steps += decoding(mechanism, batch, plan.setting, POSITIONS, MANY * plan.patience, plan.watch)
            record.done.append(key)
            plan.save()


def bounded_state(mechanism: Any) -> bool:
    """Whether its decoding state has a size that does not grow."""
    return isinstance(mechanism, Attention) and mechanism.traits.memory in ("constant", "window")


@torch.no_grad()
def decoding(
    mechanism: Any, batch: int, setting: Setting, positions: Iterable[int] = POSITIONS, patience: float = math.inf,
    watch: Watch = lambda _: None, rounds: int = STEPS,
) -> list[Step]:  # fmt: skip
    """Time one token at every position, in turns, from a state that has read that many tokens.

    Positions that would take more than ``patience`` seconds to reach are left out and say so.
    """
    steps = [Step(repr(mechanism), batch, position) for position in positions]
    torch.manual_seed(setting.seed)
    longest = max(positions) + rounds * len(steps) + 8
    bound = Bound(mechanism, Shape(setting.heads, setting.head_dim, longest)).to(setting.device, setting.dtype)

    def tokens(count: int) -> Any:
        drawn = torch.randn(3, batch, setting.heads, count, setting.head_dim)
        return drawn.to(setting.device, setting.dtype).unbind()

    states: dict[int, Any] = {}
    state, read, began = None, 0, time.perf_counter()
    try:
        for step in steps:
            ahead = (time.perf_counter() - began) * (step.position / read) if read else 0.0
            if ahead > patience:
                break
            watch(f"decoding: {mechanism!r}, batch {batch}, reads {step.position:,} tokens")
            while read < step.position:
                count = min(PREFILL, step.position - read)
                state, read = bound.decode(*tokens(count), state)[1], read + count
            states[step.position] = state
        token, advancing = tokens(1), dict(states)

        def advance(at: int) -> None:
            advancing[at] = bound.decode(*token, advancing[at])[1]

        runs = {at: lambda at=at: advance(at) for at in states}
        samples = clock.in_turns(runs, setting.device, rounds + 2)
    except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError) as error:
        return [replace(step, note=failure(error)) for step in steps]
    for step in steps:
        if step.position in states:
            step.seconds = statistics.median(samples[step.position][2:])
            step.state_bytes = state_bytes(states[step.position])
        else:
            step.note = f"over budget: reading so far would take more than {patience:.0f} s"
    return steps


# What the figures say


def speeds(record: Benchmark, name: str, which: Pass = "forward") -> dict[int, float]:
    """The baseline's time over its own by length, median over rounds: above 1 is faster."""
    return {length: 1 / ratio for length, ratio in record.ratios(name, which).items() if ratio}


def crossover(known: Mapping[int, float]) -> tuple[float, bool] | None:
    """The length from which on it is faster at every measured length, and whether it may be shorter still.

    Between the last length at which it was slower and the first of the lasting lead, speeds are joined by a straight
    line on logarithmic scales; where it led from the first length on, that length is an upper bound.
    """
    lengths = sorted(known)
    lost = [n for n in lengths if known[n] <= 1.0]
    won = [n for n in lengths if n > max(lost, default=0)]
    if not won:
        return None
    if not lost:
        return float(won[0]), True
    below, above = -math.log(known[lost[-1]]), math.log(known[won[0]])
    return lost[-1] * (won[0] / lost[-1]) ** (below / (below + above)), False


def matches(record: Benchmark, which: Pass = "forward") -> list[dict[str, Any]]:
    """Ours against the fastest peer of the same family, direction and kind, at every length where both were timed."""
    compared = []
    for row in record.rows:
        key = (row.family, row.is_causal, row.kind)
        peers = [r for r in record.rows if r.owner not in (OURS, TORCH) and (r.family, r.is_causal, r.kind) == key]
        for length, mine in speeds(record, row.name, which).items() if row.owner == OURS else ():
            theirs = {peer.name: speeds(record, peer.name, which).get(length, 0.0) for peer in peers}
            best = max(peers, key=lambda peer: theirs[peer.name], default=None)
            if best is not None and theirs[best.name]:
                held = {"name": row.name, "length": length, "peer": best.name, "same": best.same}
                compared.append({**held, "factor": mine / theirs[best.name]})
    return compared


def memory_of(record: Benchmark, name: str, which: Pass = "forward") -> dict[int, int]:
    """Peak growth by length in fresh processes."""
    peaks = {peak.length: getattr(peak, f"{which}_bytes") for peak in record.memory if peak.name == name}
    return {length: size for length, size in sorted(peaks.items()) if size is not None}


def percent_of_ceiling(record: Benchmark, cell: Cell | None, which: Pass = "forward") -> float | None:
    """Counted operations per second of the fastest sample, in percent of the best matrix product of the same run."""
    best = None if cell is None else cell.times(which).best_ms
    operations = cell and (cell.operations if which == "forward" else cell.training_operations)
    peak = max((limits["gemm_gflops"] for limits in record.ceilings), default=math.nan)
    return 100 * operations / (best / 1000) / (peak * 1e9) if best and operations and peak > 0 else None


def flatness(steps: Iterable[Step]) -> dict[str, float]:
    """Time of a token at the last position over that at the first, for every mechanism and batch."""
    known: dict[str, dict[int, float]] = {}
    for step in steps:
        if step.seconds is not None:
            known.setdefault(f"{step.name}, batch {step.batch}", {})[step.position] = step.seconds
    return {key: times[max(times)] / times[min(times)] for key, times in known.items() if len(times) > 1}


def summarise(record: Benchmark) -> dict[str, Any]:
    """The summary of a record: what is derived from its numbers."""
    names = [row.name for row in record.rows if row.owner == OURS]
    return {
        "crossover": {n: {which: crossover(speeds(record, n, which)) for which in PASSES} for n in names},
        "decode_flatness": flatness(record.steps),
        **{f"peers_{which}": matches(record, which) for which in PASSES},
    }


def finish(plan: Plan, record: Benchmark, status: str) -> None:
    """Note how it ended, every cell that was not reached or not allowed, and the summary."""
    record.finish(status)
    by_name = {competitor.name: competitor for competitor in plan.competitors}
    record.not_reached(by_name, plan.lengths, f"the benchmark was {status} before")
    for cell in record.cells:
        row, each = record.row(cell.mechanism), by_name.get(cell.mechanism)
        if row is not None and row.check in ("wrong", "missing"):
            cell.status, cell.note = "refused", f"no speed: {'; '.join(row.faults)}"
        elif each is not None and not plan.timed(each, cell.length):
            cell.note = f"peers run up to {plan.peers_to:,} tokens"
    record.summary = summarise(record)


def table(record: Benchmark) -> Table:
    """Speeds forward / forward and backward beside the baseline's in the same rounds, at three lengths."""
    measured = sorted({cell.length for cell in record.cells if cell.status == "measured"})
    shown = sorted({measured[0], measured[len(measured) // 2], measured[-1]}) if measured else []
    last = shown[-1] if shown else 0

    def speed(name: str, length: int) -> Value:
        known = [value for which in PASSES if (value := speeds(record, name, which).get(length))]
        cell = record.cell(name, length)
        text = " / ".join(f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in known)
        return Value(text, "fast" if known[0] > 1 else "slow") if known else Value(cell.status if cell else "-", "none")

    def costs(name: str) -> list[str]:
        cell, sizes = record.cell(name, last), memory_of(record, name)
        spent = [ms for ms in (cell.forward_ms, cell.training_ms) if ms is not None] if cell else []
        size = f"{bytes_of(sizes[max(sizes)])} at {max(sizes):,}" if sizes else "-"
        return [" / ".join(map(milliseconds, spent)) or "-", fixed(percent_of_ceiling(record, cell), ".2g"), size]

    def faster(name: str) -> str:
        known = speeds(record, name)
        since = crossover(known)
        return f"{'≤ ' * since[1]}{since[0]:,.0f}" if since else f"never up to {max(known):,}" if known else "not timed"

    marks = {"faulty": " *", "wrong": " WRONG", "missing": " not installed"}
    rows = [TableRow([Value(name, "strong"), *("" for _ in shown), *costs(name), ""])
            for name in dict.fromkeys(row.reference for row in record.rows)]  # fmt: skip
    for row in record.rows:
        kind = "broken" if row.check == "wrong" else "" if row.owner == OURS else "pale"
        name = Value(("" if row.owner == OURS else "  ") + row.name + marks.get(row.check, ""), kind)
        rows.append(TableRow([name, *(speed(row.name, n) for n in shown), *costs(row.name), faster(row.name)]))
    heads = ["competitor", *(f"speed at {n:,}" for n in shown), f"time at {last:,}", "% of GEMM", "memory"]
    return Table([*heads, "faster from"], rows)


def remarks(record: Benchmark) -> Iterator[str]:
    """The remarks below the table."""
    for limits in record.ceilings:
        yield (
            "Machine {when}: matrix product {gemm_gflops:.0f} GFLOP/s, small batched products {bmm_gflops:.0f}, exp "
            "{exp_gelem_s:.2g} G numbers/s, copy {copy_gb_s:.0f} GB/s, new tensor {fresh_gb_s:.0f} GB/s, an "
            "operation on one number {empty_us:.1f} us".format(**limits)
        )
    for which, length in itertools.product(PASSES, sorted({cell.length for cell in record.cells})):
        found = [each for each in record.summary.get(f"peers_{which}", ()) if each["length"] == length]
        if found:
            mean, least = statistics.geometric_mean(e["factor"] for e in found), min(found, key=lambda e: e["factor"])
            yield (
                f"{which.capitalize()}, {length:,} tokens: {mean:.2f} times the speed of the best peer (geometric "
                f"mean); least {least['factor']:.2f} ({least['name']} against {least['peer']})"
            )
    for name, ratio in flatness(record.steps).items():
        yield f"Decoding {name}: a token costs {ratio:.2f} times as much at the end as at the start"
    for row in record.rows:
        if row.faults:
            mark = {"wrong": "WRONG, so no speed", "missing": "not run"}.get(row.check, "*")
            yield f"{mark} {row.name}: {'; '.join(row.faults)}"
    yield from record.missing()
    yield from (f"{peak.name}, memory at {peak.length:,} tokens: {peak.note}" for peak in record.memory if peak.note)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = Arguments(
        prog="python -m benchmarks.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole = {"type": int, "metavar": "N"}
    parser.add_argument("--mechanisms", nargs="+", help="Names or expressions. Default: all.")
    parser.add_argument("--lengths", **whole, nargs="+", default=[*LENGTHS], help="Tokens. Default: 64 to 4096.")
    parser.add_argument("--causal", action=YesNo, help="One direction only. Default: both.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--heads", **whole, default=8)
    parser.add_argument("--head-dim", **whole, default=64)
    parser.add_argument("--batch", **whole, default=1)
    parser.add_argument("--threads", **whole, help="CPU threads. Default: all cores.")
    parser.add_argument("--no-backward", dest="backward", action="store_false", help="Leave training passes out.")
    parser.add_argument(
        "--memory-lengths", **whole, nargs="+", help="Lengths whose memory is measured. Default: from 1024 on; 0: none."
    )
    parser.add_argument("--decode", action="store_true", help="Also time single tokens up to position 65,536.")
    parser.add_argument("--vs-peers", action="store_true", help="Run published packages beside ours.")
    parser.add_argument("--peers-to", **whole, help="Longest sequence for peers. Default: all.")
    parser.add_argument("--patience", type=float, default=5.0, help="Seconds of a pass; what takes longer is left out.")
    parser.add_argument("--seed", **whole, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="Folder for bench.json.")
    parser.add_argument("--resume", action="store_true", help="Measure what the record in the folder lacks.")
    parser.add_argument("--restart", action="store_true", help="Begin anew over the record in the folder.")
    return parser.parse_args(arguments)


def planned(asked: argparse.Namespace) -> Plan:
    """The plan of a command line."""
    inputs.threads(asked.threads or torch.get_num_threads())
    device, dtype = inputs.device(asked.device), inputs.dtype(asked.dtype)
    setting = Setting(asked.heads, asked.head_dim, device, dtype, False, asked.backward, asked.seed, asked.batch)
    peers = list(import_module("benchmarks.peers").PEERS) if asked.vs_peers else []
    mechanisms = inputs.mechanisms(asked.mechanisms) if asked.mechanisms else default_mechanisms()
    competitors = chosen(mechanisms, asked.causal, peers)
    if not competitors:
        raise InputError("--causal: none of these mechanisms is causal")
    lengths = inputs.lengths(asked.lengths)
    sizes = [n for n in lengths if n >= SHORTEST_MEMORY] if asked.memory_lengths is None else asked.memory_lengths
    sizes = [] if sizes == [0] else inputs.lengths(sizes, "--memory-lengths")
    return Plan(competitors, lengths, sizes, setting, asked.patience, asked.decode, asked.peers_to)


def main(arguments: list[str] | None = None) -> int:
    """Run it; 1 where one of ours is wrong, 130 where it was interrupted."""
    asked = parsed(arguments)
    plan, path = planned(asked), asked.out / Benchmark.data
    names = ("heads", "head_dim", "batch", "backward", "dtype", "seed", "patience")
    direction = {None: "both", True: "causal", False: "bidirectional"}[asked.causal]
    meta = begun(
        plan.setting.device, **{name: getattr(asked, name) for name in names}, lengths=plan.lengths,
        direction=direction, memory="growth of resident memory in a fresh process per pass, beyond weights and inputs",
    )  # fmt: skip
    meta["command"] = ["python", "-m", "benchmarks.bench", *(sys.argv[1:] if arguments is None else arguments)]
    with inputs.alone(asked.out):
        inputs.results([path], asked.out, "a benchmark", resume=asked.resume, restart=asked.restart)
        record = Benchmark.resume(path, meta) if asked.resume else Benchmark(meta)
        began = time.perf_counter()
        steps = len(plan.competitors) * (1 + len(plan.memory_lengths) + 4 * len(plan.lengths))
        with tables.counted(steps) as watch:
            watched = replace(plan, watch=watch, save=lambda: record.save(path))
            status = tables.until_stopped(lambda: bench(watched, record))
        record.meta["seconds"] = round(record.meta.get("seconds", 0.0) + time.perf_counter() - began, 1)
        finish(plan, record, status)
        record.save(path)
    show(table(record), "", *remarks(record))
    say(f"\nRecord: {path}" + ("; the same command with --resume goes on" if status == "interrupted" else ""))
    return 130 if status == "interrupted" else int(any(row.check == "wrong" for row in record.rows))


if __name__ == "__main__":
    keep_memory()
    try:
        sys.exit(main())
    except InputError as problem:
        sys.exit(f"benchmarks: {problem}")
