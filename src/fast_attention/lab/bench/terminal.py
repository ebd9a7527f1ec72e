"""The benchmark on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from fast_attention.lab.bench import figures
from fast_attention.lab.bench.decoding import flatness
from fast_attention.lab.bench.entrants import OURS
from fast_attention.lab.bench.record import Benchmark, Row
from fast_attention.lab.bench.run import percent_of_ceiling
from fast_attention.lab.numbers import bytes_of, milliseconds
from fast_attention.lab.records import Cell

MARKS = {"right": "", "faulty": " *", "wrong": " WRONG", "missing": " not installed", "not checked": " not checked"}


def table(record: Benchmark) -> Table:
    """A row for everybody; speeds are forward / forward and backward, against the line to beat in the same rounds."""
    measured = sorted({cell.length for cell in record.cells if cell.status == "measured"})
    shown = sorted({measured[0], measured[len(measured) // 2], measured[-1]}) if measured else []
    found = Table(box=None, header_style="bold", pad_edge=False)
    found.add_column("who", no_wrap=True)
    for length in shown:
        found.add_column(f"speed at {length:,}", justify="right")
    last = shown[-1] if shown else 0
    for title in (f"time at {last:,}", "% of GEMM", "memory", "faster from"):
        found.add_column(title, justify="right")
    lines = dict.fromkeys(row.reference for row in record.rows)
    for name in lines:
        times = [_both(record.cell(name, length)) for length in shown]
        found.add_row(Text(name, style="bold"), *times, *_costs(record, name, last), "")
    for row in record.rows:
        name = Text(("" if row.owner == OURS else "  ") + row.name + MARKS[row.check], style=_style(row))
        cells = [_speeds(record.cell(row.name, length)) for length in shown]
        timed = record.cell(row.name, last)
        found.add_row(name, *cells, _both(timed), *_costs(record, row.name, last)[1:], wins(record, row.name))
    return found


def _style(row: Row) -> str:
    return "bold red" if row.check == "wrong" else "" if row.owner == OURS else "dim"


def _speeds(cell: Cell | None) -> Text:
    """``12 / 9.5``, coloured by who leads."""
    if cell is None or cell.status != "measured":
        return Text(cell.status if cell else "-", style="dim")
    forward, training = (figures.speed(cell, which) for which in figures.PASSES)
    words = " / ".join(times(value) for value in (forward, training) if value)
    return Text(words, style="green" if forward and forward > 1 else "red")


def times(value: float) -> str:
    """A speed: ``0.52``, ``8.3``, ``31``."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _both(cell: Cell | None) -> str:
    if cell is None or cell.forward_ms is None:
        return "-"
    both = (cell.forward_ms, cell.training_ms)
    return " / ".join(milliseconds(value) for value in both if value is not None)


def _costs(record: Benchmark, name: str, length: int) -> list[str]:
    cell = record.cell(name, length)
    share = None if cell is None else percent_of_ceiling(record, cell)
    weighed = figures.memory_of(record, name)
    size = weighed[max(weighed)] if weighed else None
    at = f" at {max(weighed):,}" if weighed else ""
    return [_both(cell), "-" if share is None else f"{share:.2g}", bytes_of(size) + at]


def wins(record: Benchmark, name: str, which: figures.Pass = "forward") -> str:
    """From which length on it leads, in words."""
    known = figures.speeds(record, name, which)
    found = figures.crossover(known)
    if not known:
        return "not timed"
    if found is None:
        return f"never up to {max(known):,}"
    return f"{'≤ ' if found[1] else ''}{found[0]:,.0f}"


def remarks(record: Benchmark) -> Iterator[str]:
    """What stands below the table."""
    for found in record.ceilings:
        yield (
            f"Machine {found['when']}: matrix product {found['gemm_gflops']:.0f} GFLOP/s, small batched products "
            f"{found['bmm_gflops']:.0f}, exp {found['exp_gelem_s']:.2g} G numbers/s, copy {found['copy_gb_s']:.0f} "
            f"GB/s, fresh memory {found['fresh_gb_s']:.0f} GB/s, an operation on one number {found['empty_us']:.1f} us"
        )
    summary = record.summary
    for which, words in zip(figures.PASSES, ("Forward", "Forward and backward"), strict=True):
        found = summary.get(f"peers_{which}", {})
        if found.get("smallest"):
            worst = found["smallest"]
            who = worst["family"] + (", causal" if worst["is_causal"] else "")
            alike = found["geometric_mean_of_the_same_function"]
            alike = "" if alike is None else f" ({alike:.2f} against those that compute the same function)"
            yield (
                f"{words}, {summary['common_length']:,} tokens: {found['geometric_mean']:.2f} times the speed of the "
                f"best peer in the geometric mean{alike}; least {worst['factor']:.2f} ({who} against "
                f"{worst['peer']})"
            )
    for (name, batch), ratio in flatness(record.steps).items():
        yield f"Decoding {name}, batch {batch}: a token costs {ratio:.2f} times as much at the end as at the start"
    for row in record.rows:
        if row.faults:
            mark = {"wrong": "WRONG, so no speed", "missing": "not run"}.get(row.check, "*")
            yield f"{mark} {row.name}: {'; '.join(row.faults)}"
    said = dict.fromkeys(
        f"{cell.mechanism} at {cell.length:,} tokens: {cell.status}, {cell.note}"
        for cell in record.cells
        if cell.status in ("failed", "over budget")
    )
    yield from said
