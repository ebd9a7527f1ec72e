"""Turns measurements at one length into advice: what to use, what not, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from rich.text import Text

from fast_attention.lab import pages, pictures, report, verdicts
from fast_attention.lab.pages import Block, Figure, Folded, Listing, Section, Words
from fast_attention.lab.records import EXACT, Cell, Comparison, Pass
from fast_attention.lab.tables import Number, Table, Value, bytes_of, count, factor, milliseconds, percent
from fast_attention.lab.tables import Row as Line
from fast_attention.lab.verdicts import Kind, Verdict

ORDER: tuple[Kind, ...] = get_args(Kind)
FASTER = 0.95  # of exact attention's time: what is nearer than that to a draw is no reason to give up exactness
STAND_INS = "Gaussian stand-ins"
UNRANKED = {
    "open": "May be the answer, and was not measured for lack of --seconds", "unknown": "No error is known of",
    "cannot": "Not measured",
}  # fmt: skip
NO_REFERENCE = "Beside exact attention with positions that the model was not trained with, which is no reference:"
_POINTS = """Green is what nothing beats in both; the dotted line is the error that was allowed. What must be trained
first, or was read at fewer tokens only, has no error to show."""


@dataclass
class Advised(Comparison):
    """All of one advice: the comparison that it rests on, the ranking, and the answer."""

    kind, noun, data, page = "advise", "advice", "advice.json", "advice.html"

    advice: dict[str, Any] = field(default_factory=dict)  # what to "use" (None: undecided), and the answer in "words"
    ranking: list[Verdict] = field(default_factory=list)  # the best first

    def __post_init__(self) -> None:
        self.ranking = [replace(row, cannot=tuple(row.cannot)) for row in self.ranking]  # JSON knows lists only

    def answer(self, mechanisms: list[Any]) -> None:
        """Rank the mechanisms by what was measured, and put that into words; exact attention may be what to use.

        Beyond the model's own positions exact attention is no reference: the words are the decision for long texts.
        """
        self.ranking = ranked(self, mechanisms)
        if self.far:
            self.advice = {"use": f"chunks of {self.meta['context']:,} tokens", "words": self.far}
        else:
            is_open = any(row.kind == "open" for row in self.ranking)
            self.advice = {"use": None if is_open else self.ranking[0].mechanism, "words": answer(self)}

    @property
    def asked(self) -> tuple[int, float, Pass]:
        """How many tokens, how large a median error at most, and which pass counts."""
        return self.meta["length"], self.meta["budget"], self.meta["pass"]

    @property
    def far(self) -> list[str]:
        """Advice where the length is beyond the model's own positions; else empty."""
        return verdicts.beyond(self, [self.meta["length"]])


def ranked(record: Advised, mechanisms: list[Any]) -> list[Verdict]:
    """Exact attention and every mechanism, best first.

    Those within the budget and faster, the fastest first; exact attention; those that are faster, and within the budget
    at fewer tokens than asked for, because no more were read; those within the budget that are no faster; those beyond
    the budget, by their error; those that may be the answer and were not measured for lack of time; those of which no
    error is known; those that cannot do it or were not measured.
    """
    length, budget, which = record.asked
    exact = record.cell(EXACT, length) or Cell(EXACT, length)
    rows = [verdicts.verdict(record, each, length, budget, which, enough=FASTER) for each in mechanisms]
    time, peak = exact.times(which).ms, exact.peak_bytes
    rows.append(Verdict(EXACT, "exact", "the reference", time, 1.0, peak, 0.0, 0.0, length, length=length))

    def order(row: Verdict) -> tuple[int, float, float]:
        error = math.inf if row.median_error is None else row.median_error
        return ORDER.index(row.kind), error if row.kind == "inexact" else 0.0, row.ratio or math.inf

    return sorted(rows, key=order)


def answer(record: Advised) -> list[str]:
    """The answer in one to four sentences; no verdict while one that may be the answer was not measured."""
    rows, would_do = record.ranking, record.meta.get("would_do")
    late = sum(row.kind == "cannot" and row.note.startswith(verdicts.LATE) for row in rows)
    more = [f"Not timed, for lack of --seconds: {late} more, which are no estimates of exact attention."] * bool(late)
    if names := [row.mechanism for row in rows if row.kind == "open"]:
        enough = "more --seconds" if would_do is None else f"--seconds {would_do}"
        best = rows[0]
        so_far = [f"So far {best.mechanism} is best: {best.note}, median error {percent(best.median_error)}."]
        return [
            f"At {record.asked[0]:,} tokens undecided: give {enough}.",
            f"May be the answer, and not measured yet: {verdicts.few(names)}.",
            *so_far * (best.kind == "use"),
        ]
    return [*_sentences(rows, record), *more]


def _sentences(rows: list[Verdict], record: Advised) -> list[str]:
    """Sentences about the best rows of each kind."""
    length, most, _ = record.asked
    at, best, budget = f"At {length:,} tokens", rows[0], percent(most)
    unknown = sum(row.kind == "unknown" and row.is_faster for row in rows)
    more = f"Faster here, but other functions or to be trained first, so that no error is known: {unknown} more."
    if best.kind == "use":
        errors = f"median error {percent(best.median_error)} (worst head {percent(best.worst_error)}; allowed {budget})"
        return [f"{at} use {best.mechanism}: {best.note}, {errors}.", *[more] * bool(unknown)]
    first = {kind: next((row for row in rows if row.kind == kind), None) for kind in ORDER}
    if unproven := first["unproven"]:
        return [
            f"{at} keep exact attention: no error is known there, as no more than {unproven.error_length:,} were read.",
            f"Worth a look is {unproven.mechanism}: median error {percent(unproven.median_error)} at "
            f"{unproven.error_length:,} tokens, {verdicts.speed(unproven.ratio or 1.0)} as exact attention at "
            f"{length:,}.",
        ]
    if near := first["slower"]:
        return [
            f"{at} keep exact attention: nothing within a median error of {budget} is faster.",
            f"The nearest, {near.mechanism}, is {near.note}; fast-attention compare measures greater lengths.",
        ]
    keep = [f"{at} keep exact attention: nothing that needs no training stays within a median error of {budget}."]
    if nearest := first["inexact"]:
        keep.append(
            f"The nearest, {nearest.mechanism}, has {percent(nearest.median_error)} and is "
            f"{verdicts.speed(nearest.ratio or 1.0)} as exact attention."
        )
    return [*keep, *[more] * bool(unknown)]


def ranking(record: Advised) -> Table:
    """Rows in their ranking, the best first."""
    lines = []
    for number, row in enumerate((row for row in record.ranking if row.kind not in UNRANKED), 1):
        error: str = "-"
        if row.median_error is not None and row.error_length == record.meta["length"]:
            errors = f"{percent(row.median_error)} / {percent(row.worst_error)}"
            error = Number("0" if row.kind == "exact" else errors, row.median_error)
        measured = [error, milliseconds(row.milliseconds), factor(row.ratio), bytes_of(row.peak_bytes)]
        words = (Value(each, "words") for each in (row.note, ", ".join(row.cannot)))
        kind = {"use": "chosen", "exact": "exact"}.get(row.kind, "")
        lines.append(Line([row.mechanism, count(number), *measured, *words], kind))
    heads = ["mechanism", "rank", "error: median / worst", "time", "speed", "memory", "why here", "cannot"]
    return Table(heads, lines, left=(6, 7))


def unranked(record: Advised) -> dict[str, list[tuple[str, str]]]:
    """Mechanisms that have no rank, and why, under a title each; those of one reason together."""
    listed: dict[str, dict[str, list[str]]] = {title: {} for title in UNRANKED.values()}
    for row in record.ranking:
        if row.kind in UNRANKED:
            why = row.note if row.ratio is None else f"{factor(row.ratio)}, {row.note}"
            listed[UNRANKED[row.kind]].setdefault(why, []).append(row.mechanism)
    return {title: [(", ".join(each), why) for why, each in rows.items()] for title, rows in listed.items() if rows}


def measured(record: Advised) -> list[str]:
    """On what the errors and the times were measured."""
    meta, read = record.meta, "; ".join(record.meta["error_tensors"].values())
    side = "causal" if meta["causal"] else "both sides"
    passes = "forward" if meta["pass"] == "forward" else "forward and backward"
    words = [f"Errors on {meta['quality']}: {meta['source']}, {read}."]
    if meta["quality"] == STAND_INS:
        words.append("They say little of a trained model's heads: name a model to know.")
    words.append(
        f"Times of {passes}, {meta['batch']} x {meta['heads']} heads of width {meta['head_dim']}, {side}, "
        f"{meta['dtype']}, {meta['hardware']}, {meta['threads']} of {meta['cores']} threads."
    )
    return [*words, *meta.get("conditions", [])]


def shown(record: Advised) -> list[Table | Text | str]:
    """The advice on the terminal."""
    exact = [Text(words, style="bold") for words in verdicts.same_results(record.meta.get("same_results"))]
    parts: list[Table | Text | str] = [
        *exact, *(Text(words, style="" if number else "bold") for number, words in enumerate(record.advice["words"]))
    ]  # fmt: skip
    parts += ["", *[NO_REFERENCE] * bool(record.far), ranking(record)]
    for title, lines in unranked(record).items():
        parts += ["", f"{title}:", *(f"  {name}: {why}" for name, why in lines)]
    return [*parts, Text("\n" + "\n".join(measured(record)), style="dim")]


def html(record: Advised) -> str:
    """The page."""
    meta = record.meta
    facts: dict[str, Any] = {
        "Asked": f"{meta['length']:,} tokens, a median error of {percent(meta['budget'])} at most",
        "Measured": " ".join(measured(record)),
    }
    exact = verdicts.same_results(meta.get("same_results"))
    sections = [
        Section("Advice", [*(Words(each, "lead") for each in [*exact, *record.advice["words"]]), *_points(record)]),
        Section("Ranking", [*[Words(NO_REFERENCE)] * bool(record.far), ranking(record)]),
        *(Section(title, [Listing(lines)]) for title, lines in unranked(record).items()),
        Section("Times and memory", [Folded("Every error, time and peak", report.every(record))]),
    ]
    return pages.page_of(record, sections, facts, f"{meta['source']}, {meta['length']:,} tokens")


def _points(record: Advised) -> list[Block]:
    """Error against speed at the length asked for."""
    length = record.meta["length"]
    points = pictures.tradeoff(record, length, record.meta["pass"])
    if points is None:
        return []
    passes = "forward pass" if record.meta["pass"] == "forward" else "forward and backward pass"
    picture = pictures.scatter(points, record.meta["budget"])
    return [Figure(picture, f"Error against speed at {length:,} tokens, a {passes}. {_POINTS}")]
