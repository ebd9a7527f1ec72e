"""Shows a comparison: the table on the terminal, and the page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fast_attention import catalogue
from fast_attention.lab import pages, pictures, tables, verdicts
from fast_attention.lab.pages import Figure, Folded, Listing, Section, Words
from fast_attention.lab.records import EXACT, PASSES, Cell, Comparison
from fast_attention.lab.tables import Row, Table, Value, bytes_of, count, digits, factor, milliseconds, percent

_READING = """A row is of one length. What estimates exact attention stands first, then what must be trained, then
other functions; the fastest first. Speed is exact attention's time divided by the mechanism's, forward pass, median
over interleaved rounds, and below it the middle half of the rounds: green is faster, red slower, grey about equal,
within noise. Errors are relative RMS against exact attention on the model's own tensors, of the median head and of
the worst. "Pairs read" are the visible pairs of a query and a key that it weighs: where nearly all are read, a small
error says little. A mixer has no queries and keys: it is timed on whole tokens of the same width."""
_CAPTION = """a forward pass: right is faster, down is more exact, green is what nothing beats in both. What must be
trained first has no error to show."""


def present(record: Comparison, folder: Path, as_json: bool) -> None:
    """Print what swap gains without another result, the table, and at the end the answer."""
    first = verdicts.same_results(record.meta.get("same_results"))
    last = [*verdicts.answer(record), *record.meta["conditions"]]
    tables.present(record, folder, as_json, *first, table(record), last=last)


def html(record: Comparison) -> str:
    """The page: the answer, the picture, the table."""
    meta = record.meta
    facts = {
        "Tensors": meta["source"],
        "Errors on": "; ".join(meta.get("error_tensors", {}).values()) or "nothing yet",
        "Times on": f"Gaussian tensors of the same {meta['heads']} heads of width {meta['head_dim']}, one sequence of "
        f"{', '.join(f'{length:,}' for length in meta['lengths'])} tokens, {meta['dtype']}",
        "Direction": "causal" if meta["causal"] else "bidirectional",
        "Exact attention": "torch's fused scaled_dot_product_attention, in the same process and the same rounds",
    }
    exact = verdicts.same_results(meta.get("same_results"))
    opening = [Words(words, "lead") for words in [*exact, *verdicts.answer(record)]]
    points = pictures.tradeoff(record, record.length)
    no_reference = points is not None and verdicts.beyond(record, [points.length])
    caption = _CAPTION + " Exact attention is no reference at this length: see above." * bool(no_reference)
    figure = [] if points is None else [
        Figure(
            pictures.scatter(points, meta.get("asked")), f"Error against speed at {points.length:,} tokens, {caption}",
            "small",
        )
    ]  # fmt: skip
    sections = [
        Section("Error against speed", figure),
        Section(
            "Error, speed and memory",
            [table(record), Words(_READING), Folded("Every error, time and peak, at every length", every(record))],
        ),
        Section("Not measured", [Listing(notes)] if (notes := missing(record)) else []),
    ]
    opening += [Words(words, "warn") for words in meta.get("conditions", [])]
    return pages.page_of(record, sections, facts, meta["source"], opening)


def missing(record: Comparison) -> list[str]:
    """Why times and errors are missing."""
    errors = [f"{e.mechanism}, error at {e.length:,} tokens: {e.note}" for e in record.errors if e.note]
    return record.missing() + errors


def order(record: Comparison) -> list[str]:
    """Exact attention and what estimates it, then what is to be trained, then other functions; the fastest first."""

    def rank(name: str) -> tuple[float, ...]:
        mechanism: Any = None if name == EXACT else catalogue.parse(name)
        stands_in = mechanism is None or mechanism.traits.approximates is not None
        measured = record.ratios(name)
        last = max(measured, default=0)
        return 0 if stands_in else 1 if verdicts.learns(mechanism) else 2, -last, measured.get(last, math.inf)

    return sorted([EXACT, *record.mechanisms], key=rank)


def table(record: Comparison) -> Table:
    """Error, speed and memory of all at one length, for the terminal and the page; and from which length it is faster.

    That length is the greatest at which error and speed are known, or else the greatest that was timed.
    """
    timed = record.ratios(EXACT)
    at = record.length if record.length in timed else max(timed or record.meta["lengths"])
    assert at is not None
    passes = PASSES if record.meta["backward"] else PASSES[:1]
    rows = []
    for name in order(record):
        cell = record.cell(name, at) or Cell(name, at)
        wins = ["" if name == EXACT else verdicts.wins(record, name, which) for which in passes]
        error, worst, pairs = _error(record, name, at)
        row = [name, error, _speed(cell), *wins, worst, pairs, bytes_of(cell.peak_bytes)]
        rows.append(Row(row, "exact" if name == EXACT else ""))
    faster = ["faster", "faster in training"][: len(passes)]
    heads = ["mechanism", f"error at {at:,}", f"speed at {at:,}", *faster, "worst head", "pairs read"]
    return Table([*heads, f"memory at {at:,}"], rows, left=[3 + number for number in range(len(passes))])


def _error(record: Comparison, name: str, length: int) -> list[Value]:
    """The cells of an error, and of the pairs that are read."""
    error = record.error(name, length)
    summary = error.summary() if error else None
    if error is None or summary is None:
        return [Value(_unmeasured(name), "none"), Value("-"), Value("-")]
    share = error.visible_fraction
    pairs = "-" if share is None else "all" if share == 1.0 else percent(share)
    return [Value(percent(summary[0])), Value(percent(summary[1])), Value(pairs)]


def _unmeasured(name: str) -> str:
    mechanism: Any = None if name == EXACT else catalogue.parse(name)
    if mechanism is None or mechanism.traits.approximates is not None:
        return "not measured" if mechanism else "reference"
    return "train it" if mechanism.traits.learned else "another function"


def _speed(cell: Cell) -> Value:
    if cell.forward_ratio is None or cell.forward_ms is None:
        return Value(cell.status, "none", f"{cell.status}: {cell.note}")
    if cell.mechanism == EXACT:
        return Value(milliseconds(cell.forward_ms), "strong")
    kind = "even" if verdicts.even(cell) else "fast" if cell.forward_ratio < 1 else "slow"
    spread = " to ".join(digits(1 / edge) for edge in (cell.forward_high, cell.forward_low) if edge is not None)
    return Value(factor(cell.forward_ratio), kind, f"{milliseconds(cell.forward_ms)}, {cell.rounds} rounds", spread)


def every(record: Comparison) -> Table:
    """All errors, times and peaks: a row for a mechanism and a length."""
    heads = ["mechanism", "tokens", "error", "speed", "forward", "forward and backward", "peak memory", "rounds"]
    cells = [cell for name in order(record) for cell in record.cells if cell.mechanism == name]
    rows = []
    for cell in (cell for cell in cells if cell.status == "measured"):
        spent = [milliseconds(cell.times(which).ms) for which in PASSES]
        error = record.error(cell.mechanism, cell.length)
        summary = error.summary() if error else None
        known = [percent(summary[0] if summary else None), factor(cell.forward_ratio)]
        rows.append([cell.mechanism, count(cell.length), *known, *spent, bytes_of(cell.peak_bytes), count(cell.rounds)])
    return Table(heads, rows)
