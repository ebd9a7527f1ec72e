"""The tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from fast_attention import catalogue
from fast_attention.conformance import Report
from fast_attention.lab import verdicts
from fast_attention.lab.numbers import bytes_of, factor, milliseconds, percent
from fast_attention.lab.records import EXACT, Comparison
from fast_attention.mechanism import Mixer


def footnotes(record: Comparison) -> list[str]:
    """Why cells are empty: one line for every mechanism and reason."""
    found: dict[tuple[str, str], list[int]] = {}
    for cell in record.cells:
        if cell.status != "measured":
            found.setdefault((cell.mechanism, f"{cell.status}: {cell.note}"), []).append(cell.length)
    said = [f"{name} at {', '.join(f'{n:,}' for n in at)} tokens: {why}" for (name, why), at in found.items()]
    said += [f"{e.mechanism}, error at {e.length:,} tokens: {e.note}" for e in record.errors if e.note]
    return said


def summary(record: Comparison) -> Table:
    """The comparison on the terminal."""
    lengths = record.meta["lengths"]
    shown = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("mechanism", no_wrap=True)
    table.add_column("error: median / worst", justify="right")
    for length in shown:
        table.add_column(f"speed at {length:,}", justify="right")
    for title in ("wins", "wins training", f"memory at {lengths[-1]:,}", "state"):
        table.add_column(title, justify="right")
    for name in verdicts.order(record):
        last = record.cell(name, lengths[-1])
        peak, held = (None, None) if last is None else (last.peak_bytes, last.state_bytes)
        wins = [verdicts.wins(record, name, which) for which in ("forward", "training")] if name != EXACT else ["", ""]
        speeds = [_speed(record, name, length) for length in shown]
        table.add_row(Text(name), _error(record, name), *speeds, *wins, bytes_of(peak), bytes_of(held))
    return table


def _error(record: Comparison, name: str) -> Text:
    if name == EXACT:
        return Text("the reference", style="bold")
    mechanism: Any = catalogue.parse(name)
    if mechanism.traits.approximates is None:
        words = "train it" if mechanism.traits.learned else "another function"
        return Text(words + (", mixer" if isinstance(mechanism, Mixer) else ""), style="dim")
    error = record.error(name)
    found = error.summary() if error else None
    return Text(f"{percent(found[0])} / {percent(found[1])}" if found else "not measured")


def _speed(record: Comparison, name: str, length: int) -> Text:
    cell = record.cell(name, length)
    if cell is None or cell.forward_ratio is None or cell.forward_ms is None:
        return Text(cell.status if cell else "-", style="dim")
    if name == EXACT:
        return Text(milliseconds(cell.forward_ms), style="bold")
    colour = "dim" if verdicts.even(cell) else "green" if cell.forward_ratio < 1 else "red"
    return Text(factor(cell.forward_ratio), style=colour)


def catalogue_table(chosen: list[Any]) -> Table:
    """The mechanisms with what they can do."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("mechanism", "cost", "reads", "causal", "padding", "cross", "decodes", "weights", "source"):
        table.add_column(title, no_wrap=title == "mechanism")
    for mechanism in chosen:
        traits = mechanism.traits
        weights = "learned" if traits.learned else "random" if traits.random else "-"
        yes = ["yes" if granted else "-" for granted in (traits.causal, traits.padding, traits.cross)]
        table.add_row(
            type(mechanism).__name__, traits.cost, traits.reads, *yes, traits.memory or "-", weights, traits.paper
        )
    return table


def laws(found: Report) -> Table:
    """What conformance found, law by law."""
    table = Table(box=None, header_style="bold", pad_edge=False, title=Text(found.subject), title_justify="left")
    for title in ("law", "found", "size", "limit", "detail"):
        table.add_column(title, justify="right" if title in ("size", "limit") else "left")
    colours = {"kept": "green", "broken": "bold red", "not claimed": "dim"}
    for finding in found.findings:
        said = Text(finding.status, style=colours[finding.status])
        sizes = ["", ""] if finding.status == "not claimed" else [f"{finding.size:.1e}", f"{finding.limit:.0e}"]
        table.add_row(Text(finding.law), said, *sizes, Text(finding.detail))
    return table
