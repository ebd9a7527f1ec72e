"""Shows a benchmark: the table and the remarks on the terminal, and the page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from fast_attention.lab import pages
from fast_attention.lab.bench import drawings, figures
from fast_attention.lab.bench.competitors import OURS
from fast_attention.lab.bench.decoding import flatness
from fast_attention.lab.bench.figures import percent_of_ceiling
from fast_attention.lab.bench.record import Benchmark
from fast_attention.lab.bench.record import Row as Entry
from fast_attention.lab.numbers import Number, bytes_of, count, fixed, milliseconds
from fast_attention.lab.pages import Figure, Folded, Listing, Section, Words
from fast_attention.lab.records import PASSES, Cell, Pass
from fast_attention.lab.tables import Row, Table, Value

MARKERS = {"right": "", "faulty": " *", "wrong": " WRONG", "missing": " not installed", "not checked": " not checked"}
BOTH = ("forward", "forward and backward")
_SPEED = """Speed is the time of exact attention divided by the row's own, in the same interleaved rounds (median of the
rounds' ratios): above 1 is faster (green), below slower (red). Exact attention is torch's fused
scaled_dot_product_attention, causal for causal rows; rows that take whole tokens (mixers, and attentions “projected”,
between linear maps) are compared with Linear, exact attention, Linear of the same width. A star marks a peer with a
fault of its own (listed below); hover for times."""
_CEILING = """Operations counted from the tensors (2 per multiply-add, 1 per element written, fused kernels by torch's
formulas) divided by the fastest time, in percent of the rate of one 2048-wide matrix product in the same run.
Mechanisms that spend their time on exponentials, sorts or memory cannot come near 100."""
_LINES = "Above the line at 1 it beats exact attention; ours solid, peers dashed, * a peer with a fault of its own."
_CROSSOVER = "The length from which on it is faster at every measured length, interpolated on logarithmic scales."
LIMITS = {
    "matrix product, GFLOP/s": "gemm_gflops", "small batched products, GFLOP/s": "bmm_gflops",
    "exp, G numbers/s": "exp_gelem_s", "copy, GB/s": "copy_gb_s", "new tensor, GB/s": "fresh_gb_s",
    "one small operation, us": "empty_us",
}  # fmt: skip


def html(record: Benchmark) -> str:
    """The page."""
    meta, length = record.meta, record.summary.get("common_length")
    facts = {
        "Tensors": f"Gaussian, batch {meta['batch']}, {meta['heads']} heads of width {meta['head_dim']}, "
        f"{', '.join(f'{n:,}' for n in meta['lengths'])} tokens, {meta['dtype']}",
        "Memory": meta["memory"],
    }
    limits = [[each["when"], *(fixed(each[key], ".3g") for key in LIMITS.values())] for each in record.ceilings]
    lead = [line for line in remarks(record) if line.startswith(("Forward", "Decoding"))]
    faults = [(row.name, "; ".join(row.faults)) for row in record.rows if row.faults]
    notes = [(row.name, row.note) for row in record.rows if row.note]
    missing = _missing(record)
    sections = [
        Section("In short", [Words(f"{line}.", "lead") for line in lead]),
        *([] if length is None else _measured(record, length)),
        Section("Checks that failed", [Listing(faults)] if faults else []),
        Section("What peers do differently", [Listing(notes)] if notes else []),
        Section("Not measured", [Listing(missing)] if missing else []),
        Section("The machine's limits in this run", [Table(["when", *LIMITS], limits)]),
        pages.run(meta, facts),
        pages.again(meta, record.data),
    ]
    return pages.page("bench", sections, [*pages.partial(meta, "benchmark"), pages.where(meta, facts["Tensors"])])


def _measured(record: Benchmark, length: int) -> Iterator[Section]:
    """Pictures and tables of what was measured."""
    shown = PASSES if record.meta["backward"] else PASSES[:1]
    words = [f"{title.capitalize()} pass. {_LINES}" for title in BOTH]
    speeds = [Figure(drawings.speeds(record, which), text) for which, text in zip(shown, words, strict=False)]
    yield Section("Speed against length", speeds)
    if figures.matches(record, length):
        words = f"At {length:,} tokens: ours beside the best peer of the same kind and direction, with the factor."
        picture = Figure(drawings.beside_peers(record, length), words)
        yield Section("Beside the best peer", [picture, Folded("Every pair", _pairs(record, length))])
    yield Section("Percent of the ceiling", [Figure(drawings.ceilings(record, length), _CEILING)])
    if any(figures.memory_of(record, row.name) for row in record.rows if drawings.of_ours(row)):
        words = "Peak growth of resident memory in a fresh process over the bytes of inputs and output: flat is linear."
        slopes = record.summary["memory_slope"].items()
        powers = [[name, *(fixed(each[which], ".2f") for which in PASSES)] for name, each in slopes]
        tables = [Table(["memory grows with the power", *BOTH], powers)] if powers else []
        yield Section("Memory", [Figure(drawings.memory(record), words), *tables])
    if any(step.seconds is not None for step in record.steps):
        words = "Median time of one token after so many were read: flat lines do not slow down."
        yield Section("Decoding", [Figure(drawings.decoding(record), words), Folded("Every time", _decoding(record))])
    ours = [row.name for row in record.rows if row.owner == OURS and row.check != "wrong"]
    won = Table(["mechanism", *BOTH], [[name, *(wins(record, name, which) for which in PASSES)] for name in ours])
    yield Section("Faster from", [Words(_CROSSOVER), won])
    yield Section("Speeds", [Words(_SPEED), _speeds(record)])
    yield Section("Times and memory", [Folded("Every row and length", _times(record))])


def _missing(record: Benchmark) -> list[str]:
    memory = [f"{p.name}, memory at {p.length:,} tokens: {p.note}" for p in record.memory if p.note]
    decoding = [f"{s.name}, decoding with batch {s.batch}: {s.note}" for s in record.steps if s.note]
    return [*record.missing(), *memory, *dict.fromkeys(decoding)]


def _pairs(record: Benchmark, length: int) -> Table:
    """Ours beside the best peer: a row for a pair and a pass."""
    rows = [
        [drawings.name(match), match.peer, words, *(Number(times(x), x) for x in (match.ours, match.theirs)),
         Value(fixed(match.factor, ".2f"), "fast" if match.factor >= 1 else "slow")]
        for which, words in zip(PASSES, BOTH, strict=True)
        for match in figures.matches(record, length, which)
    ]  # fmt: skip
    return Table(["mechanism", "best peer", "pass", "our speed", "the peer's", "factor"], rows, left=[1, 2])


def _decoding(record: Benchmark) -> Table:
    steps = [step for step in record.steps if step.seconds is not None]
    rows = [[s.name, count(s.batch), count(s.position), milliseconds(1e3 * (s.seconds or 0.0))] for s in steps]
    return Table(["mechanism", "batch", "position", "a token"], rows)


def _speeds(record: Benchmark) -> Table:
    columns = list(itertools.product(sorted({cell.length for cell in record.cells}), PASSES))
    heads = ["row", *(f"{n:,} {'fwd' if which == 'forward' else 'fwd+bwd'}" for n, which in columns)]
    rows = [[_title(row, "· "), *(_speed(record.cell(row.name, n), w) for n, w in columns)] for row in record.rows]
    return Table(heads, rows)


def _title(row: Entry, indent: str) -> str:
    return ("" if row.owner == OURS else indent) + row.name + MARKERS[row.check]


def _speed(cell: Cell | None, which: Pass) -> Value:
    value = figures.speed(cell, which)
    if cell is None or value is None:
        return Value("-", "none", f"{cell.status}: {cell.note}" if cell else "")
    median, least, *_ = cell.times(which)
    title = f"{milliseconds(median)}, least {milliseconds(least)}, {cell.rounds} rounds"
    return Value(Number(times(value), value), "fast" if value > 1 else "slow", title)


def _times(record: Benchmark) -> Table:
    """Everything measured, one line for a row and a length."""
    heads = ["row", "tokens", "fwd median", "fwd least", "fwd+bwd median", "fwd+bwd least", "rounds", "% of GEMM fwd",
             "% of GEMM fwd+bwd", "peak fwd", "peak fwd+bwd", "weights"]  # fmt: skip
    rows = []
    for name in [*dict.fromkeys(row.reference for row in record.rows), *(row.name for row in record.rows)]:
        for length in sorted({cell.length for cell in record.cells}):
            cell = record.cell(name, length)  # of a baseline, which ran in several groups, the first
            if cell is not None and cell.status == "measured":
                spent = [milliseconds(ms) for which in PASSES for ms in cell.times(which)[:2]]
                percents = [fixed(percent_of_ceiling(record, cell, which), ".2g") for which in PASSES]
                peaks = [bytes_of(figures.memory_of(record, name, which).get(length)) for which in PASSES]
                cells = [*spent, count(cell.rounds), *percents, *peaks, bytes_of(cell.weight_bytes)]
                rows.append([name, count(length), *cells])
    return Table(heads, rows)


def table(record: Benchmark) -> Table:
    """The table on the terminal: speeds are forward / forward and backward, against the baseline in the same rounds."""
    measured = sorted({cell.length for cell in record.cells if cell.status == "measured"})
    shown = sorted({measured[0], measured[len(measured) // 2], measured[-1]}) if measured else []
    last = shown[-1] if shown else 0
    speeds = [f"speed at {length:,}" for length in shown]
    heads = ["competitor", *speeds, f"time at {last:,}", "% of GEMM", "memory", "faster from"]
    rows = []
    for name in dict.fromkeys(row.reference for row in record.rows):
        spent = [_both(record.cell(name, length)) for length in shown]
        rows.append(Row([Value(name, "strong"), *spent, *_costs(record, name, last), ""]))
    for row in record.rows:
        kind = "broken" if row.check == "wrong" else "" if row.owner == OURS else "pale"
        cells = [_pair_of_speeds(record.cell(row.name, length)) for length in shown]
        costs = _costs(record, row.name, last)
        rows.append(Row([Value(_title(row, "  "), kind), *cells, *costs, wins(record, row.name)]))
    return Table(heads, rows)


def _pair_of_speeds(cell: Cell | None) -> Value:
    """``12 / 9.5``, green where ours leads."""
    if cell is None or cell.status != "measured":
        return Value(cell.status if cell else "-", "none")
    known = [value for which in PASSES if (value := figures.speed(cell, which))]
    return Value(" / ".join(map(times, known)), "fast" if known and known[0] > 1 else "slow")


def times(value: float) -> str:
    """A speed: ``0.52``, ``8.3``, ``31``."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _both(cell: Cell | None) -> str:
    if cell is None or cell.forward_ms is None:
        return "-"
    return " / ".join(milliseconds(value) for value in (cell.forward_ms, cell.training_ms) if value is not None)


def _costs(record: Benchmark, name: str, length: int) -> list[str]:
    cell = record.cell(name, length)
    fraction = None if cell is None else percent_of_ceiling(record, cell)
    sizes = figures.memory_of(record, name)
    size = f"{bytes_of(sizes[max(sizes)])} at {max(sizes):,}" if sizes else bytes_of(None)
    return [_both(cell), fixed(fraction, ".2g"), size]


def wins(record: Benchmark, name: str, which: Pass = "forward") -> str:
    """The length from which on a mechanism is faster, in words."""
    known = figures.speeds(record, name, which)
    if not known:
        return "not timed"
    crossover = figures.crossover(known)
    if crossover is None:
        return Number(f"never up to {max(known):,}", math.inf)
    return Number(f"{'≤ ' if crossover[1] else ''}{crossover[0]:,.0f}", crossover[0])


def remarks(record: Benchmark) -> Iterator[str]:
    """The remarks below the table."""
    for limits in record.ceilings:
        yield (
            "Machine {when}: matrix product {gemm_gflops:.0f} GFLOP/s, small batched products {bmm_gflops:.0f}, exp "
            "{exp_gelem_s:.2g} G numbers/s, copy {copy_gb_s:.0f} GB/s, new tensor {fresh_gb_s:.0f} GB/s, an "
            "operation on one number {empty_us:.1f} us".format(**limits)
        )
    summary = record.summary
    for which, words in zip(PASSES, BOTH, strict=True):
        peers = summary.get(f"peers_{which}", {})
        if worst := peers.get("smallest"):
            name = worst["family"] + (", causal" if worst["is_causal"] else "")
            alike = peers["geometric_mean_of_the_same_function"]
            alike = "" if alike is None else f" ({alike:.2f} against those that compute the same function)"
            yield (
                f"{words.capitalize()}, {summary['common_length']:,} tokens: {peers['geometric_mean']:.2f} times the "
                f"speed of the best peer in the geometric mean{alike}; least {worst['factor']:.2f} ({name} against "
                f"{worst['peer']})"
            )
    for (name, batch), ratio in flatness(record.steps).items():
        yield f"Decoding {name}, batch {batch}: a token costs {ratio:.2f} times as much at the end as at the start"
    for row in record.rows:
        if row.faults:
            mark = {"wrong": "WRONG, so no speed", "missing": "not run"}.get(row.check, "*")
            yield f"{mark} {row.name}: {'; '.join(row.faults)}"
    yield from dict.fromkeys(
        f"{cell.mechanism} at {cell.length:,} tokens: {cell.status}, {cell.note}"
        for cell in record.cells
        if cell.status in ("failed", "over budget")
    )
