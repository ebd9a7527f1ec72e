"""Turns measurements into advice: what to use, what not, why, and from which length on that changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from fast_attention.lab import verdicts
from fast_attention.lab.comparison import Comparison, Error
from fast_attention.lab.numbers import percent
from fast_attention.lab.records import EXACT, Cell, Pass

Kind = Literal["use", "trained", "exact", "unproven", "slower", "inexact", "unknown", "cannot"]
ORDER: tuple[Kind, ...] = ("use", "trained", "exact", "unproven", "slower", "inexact", "unknown", "cannot")
LATE = ("over budget", "not reached")  # begins the note of what might be timed in more time
FASTER = 0.95  # of exact attention's time: what is nearer than that to a draw is no reason to give up exactness


@dataclass(frozen=True)
class Question:
    """The question: how many tokens, how much error, and which pass counts."""

    length: int
    budget: float  # the largest median relative RMS error of the attention outputs, over all heads
    which: Pass = "forward"


@dataclass(frozen=True)
class Row:
    """One mechanism in the ranking."""

    mechanism: str
    kind: Kind
    note: str  # why it stands there
    milliseconds: float | None = None
    ratio: float | None = None  # of exact attention's time in the same rounds; below 1 is faster
    peak_bytes: int | None = None
    median_error: float | None = None
    worst_error: float | None = None
    error_length: int | None = None  # tokens at which the error was measured; fewer than asked where no more are read
    transferred_error: float | None = None  # median of the layers' relative RMS errors after a short transfer
    faster_from: float | None = None  # tokens, interpolated; None: not known, or not up to the greatest measured
    cannot: tuple[str, ...] = ()


def ranked(record: Comparison, mechanisms: list[Any], question: Question) -> list[Row]:
    """Exact attention and every mechanism, best first.

    Those within the budget and faster, the fastest first; those that are so after the transfer that was tried; exact
    attention; those that are faster, and within the budget at fewer tokens than asked for, because the model reads no
    more; those within the budget that are no faster, by the length from which they are; those beyond the budget, by
    their error; those of which no error is known; those that cannot do it or were not measured.
    """
    rows = [_row(record, mechanism, question) for mechanism in mechanisms]
    rows.append(_exact(record, question))
    return sorted(rows, key=lambda row: (ORDER.index(row.kind), *_within(row)))


def _within(row: Row) -> tuple[float, float]:
    """The order within a kind."""
    ratio, error = row.ratio or math.inf, row.median_error
    if row.kind == "inexact":
        return math.inf if error is None else error, ratio
    return (row.faster_from or math.inf, ratio) if row.kind == "slower" else (ratio, 0.0)


def _exact(record: Comparison, question: Question) -> Row:
    cell = record.cell(EXACT, question.length) or Cell(EXACT, question.length)
    milliseconds = cell.times(question.which).ms
    return Row(EXACT, "exact", "the reference", milliseconds, 1.0, cell.peak_bytes, 0.0, 0.0, question.length)


def _row(record: Comparison, mechanism: Any, question: Question) -> Row:
    name = repr(mechanism)
    tried = record.meta.get("transfer", {}).get(name, {})
    error = _error(record, name, question.length)
    cell = record.cell(name, question.length) or Cell(name, question.length)
    summary = error.summary() if error else None
    ratio = record.ratios(name, question.which).get(question.length)
    known = {
        "milliseconds": cell.times(question.which).ms, "ratio": ratio, "peak_bytes": cell.peak_bytes,
        "median_error": summary[0] if summary else None, "worst_error": summary[1] if summary else None,
        "error_length": error.length if error else None, "transferred_error": tried.get("after"),
        "cannot": tuple(verdicts.cannot(mechanism)),
    }  # fmt: skip

    def row(kind: Kind, note: str, faster_from: float | None = None) -> Row:
        return Row(name, kind, note, **known, faster_from=faster_from)  # type: ignore[arg-type]

    if ratio is None:
        return row("cannot", f"{cell.status}: {cell.note}" if cell.note else cell.status)
    speed = f"{verdicts.speed(ratio)} as exact attention"
    if ratio < FASTER and _proven(tried, question):
        return row("trained", f"{speed}, after {record.meta['transfer_minutes']:g} minutes of transfer")
    if summary is None or error is None:
        notes = [e.note for e in record.errors if e.mechanism == name and e.note]
        unmeasured = notes[0] if notes else "its error was not measured: the time for errors was spent"
        return row("unknown", verdicts.kind(mechanism) if mechanism.traits.approximates is None else unmeasured)
    if not summary[0] <= question.budget:
        return row("inexact", f"median error beyond {percent(question.budget)}")
    if ratio >= FASTER:
        return row("slower", *_later(record, name, question))
    if error.length < question.length:
        return row("unproven", f"{speed}; its error is known at {error.length:,} tokens only")
    return row("use", speed)


def _proven(tried: dict[str, Any], question: Question) -> bool:
    """Whether a transfer brought the layers within the budget, at the length asked for."""
    return tried.get("length", 0) >= question.length and tried.get("after", math.inf) <= question.budget


def _error(record: Comparison, name: str, length: int) -> Error | None:
    """The error at the greatest length up to this one at which it was measured."""
    errors = [error for error in record.errors if error.mechanism == name and error.output and error.length <= length]
    return max(errors, key=lambda error: error.length, default=None)


def _later(record: Comparison, name: str, question: Question) -> tuple[str, float | None]:
    """How a mechanism does at greater lengths, and the length from which it is faster and accurate."""
    won, end = verdicts.crossover(record, name, question.which), furthest(record, question)
    where = verdicts.crossing(record, name, question.which)
    error = _error(record, name, end)
    summary = error.summary() if error else None
    if error is not None and summary is not None and not summary[0] <= question.budget:
        return f"no faster here, and too inexact at {error.length:,} tokens", None
    if won is None or where is None or where <= question.length:
        return f"not faster up to {end:,} tokens", None
    known = "" if error is not None and error.length >= won else ", where its error is not known"
    return f"faster from about {rounded(where):,} tokens on{known}", where


def furthest(record: Comparison, question: Question) -> int:
    """The greatest length that was measured."""
    return max(record.ratios(EXACT, question.which), default=question.length)


def rounded(length: float) -> int:
    """An interpolated length in two digits: more would be pretence."""
    return int(float(f"{length:.2g}"))


def advice(record: Comparison, rows: list[Row], question: Question) -> list[str]:
    """The answer in one to four sentences."""
    late = sum(row.kind == "cannot" and row.note.startswith(LATE) for row in rows)
    if late and all(row.kind in ("exact", "cannot") for row in rows):
        return [f"At {question.length:,} tokens nothing but exact attention was timed: more --seconds may change that."]
    return [
        *_answer(record, rows, question, late),
        *([f"Not timed, for lack of --seconds: {late} more."] if late else []),
    ]


def _answer(record: Comparison, rows: list[Row], question: Question, late: int) -> list[str]:
    at, best, budget = f"At {question.length:,} tokens", rows[0], percent(question.budget)
    timed = sum(row.ratio is not None for row in rows) - 1
    nothing = f"of the {timed} timed, nothing" if late else "nothing"
    if best.kind == "use":
        return [
            f"{at} use {best.mechanism}: {best.note}, median error {percent(best.median_error or 0.0)} "
            f"(worst head {percent(best.worst_error or 0.0)}; allowed {budget}).",
            *_untrained(rows),
        ]
    if best.kind == "trained":
        return [
            f"{at} use {best.mechanism}, {best.note}: the median layer's error is then "
            f"{percent(best.transferred_error or 0.0)} (allowed {budget}).",
            f'fast-attention convert --mechanism "{best.mechanism}" does that, and fine-tunes.',
        ]
    first = {kind: next((row for row in rows if row.kind == kind), None) for kind in ORDER}
    if unproven := first["unproven"]:
        return [
            f"{at} keep exact attention: no error is known there, as no more than {unproven.error_length:,} were read.",
            f"Worth a look is {unproven.mechanism}: median error {percent(unproven.median_error or 0.0)} at "
            f"{unproven.error_length:,} tokens, {verdicts.speed(unproven.ratio or 1.0)} as exact attention at "
            f"{question.length:,}.",
        ]
    if near := first["slower"]:
        sentence = f"{at} keep exact attention: {nothing} within a median error of {budget} is faster."
        if near.faster_from is not None:
            return [sentence, f"{near.mechanism} is {near.note}."]
        end = furthest(record, question)
        beyond = f"Nor up to {end:,} tokens." if end > question.length else "Greater lengths were not measured."
        return [sentence, beyond]
    sentences = [
        f"{at} keep exact attention: {nothing} that needs no training stays within a median error of {budget}."
    ]
    if (nearest := first["inexact"]) and nearest.median_error is not None and nearest.ratio is not None:
        error, speed = percent(nearest.median_error), verdicts.speed(nearest.ratio)
        sentences.append(f"The nearest, {nearest.mechanism}, has {error} and is {speed} as exact attention.")
    return [*sentences, *_untrained(rows)]


def _untrained(rows: list[Row]) -> list[str]:
    """The number of mechanisms left out because their quality is unknown before training."""
    faster = [row for row in rows if row.kind == "unknown" and (row.ratio or math.inf) < FASTER]
    if not faster:
        return []
    return [f"Faster here, but other functions or to be trained first, so that no error is known: {len(faster)} more."]
