"""Shows an advice: the ranking on the terminal, and the page."""

from __future__ import annotations

import math
from typing import Any

from rich.text import Text

from fast_attention.lab import pages, pictures, report
from fast_attention.lab.advice.ranking import Row
from fast_attention.lab.advice.record import Advised
from fast_attention.lab.numbers import Number, bytes_of, count, factor, milliseconds, percent
from fast_attention.lab.pages import Block, Figure, Folded, Listing, Section, Words
from fast_attention.lab.pictures import Point, Tradeoff
from fast_attention.lab.tables import Row as Line
from fast_attention.lab.tables import Table, Value

STAND_INS = "Gaussian stand-ins"
UNRANKED = {"unknown": "No error is known of", "cannot": "Not measured"}
_POINTS = """The green line joins what nothing beats in both; the dotted line is the error that was allowed. What must
be trained first, or was read at fewer tokens only, has no error to show."""


def ranking(record: Advised) -> Table:
    """What is ranked, the best first."""
    lines = []
    for number, row in enumerate((row for row in record.ranking if row.kind not in UNRANKED), 1):
        error: str = "-"
        if row.median_error is not None:
            both = f"{percent(row.median_error)} / {percent(row.worst_error)}"
            error = Number("0" if row.kind == "exact" else both, row.median_error)
        measured = [error, milliseconds(row.milliseconds), factor(row.ratio), bytes_of(row.peak_bytes)]
        words = (Value(each, "words") for each in (row.note, ", ".join(row.cannot)))
        kind = {"use": "chosen", "trained": "chosen", "exact": "exact"}.get(row.kind, "")
        lines.append(Line([row.mechanism, count(number), *measured, *words], kind))
    heads = ["mechanism", "rank", "error: median / worst", "time", "speed", "memory", "why here", "cannot"]
    return Table(heads, lines, left=(6, 7))


def transfers(record: Advised) -> Table:
    """What a short transfer brought: errors of the layers' outputs, behind their projections, on held-out text."""
    rows = []
    for name, result in record.meta.get("transfer", {}).items():
        errors = [percent(result.get(when)) for when in ("before", "after")]
        rows.append([name, *errors, result.get("note", "")])
    title = f"Error of the median layer's output, before and after {record.meta.get('transfer_minutes', 0):g} minutes"
    return Table(["mechanism", "before", "after", ""], rows, left=[3], title=title)


def unranked(record: Advised) -> dict[str, list[tuple[str, str]]]:
    """Mechanisms that have no rank, and why, under a title each; those of one reason together."""
    listed: dict[str, dict[str, list[str]]] = {title: {} for title in UNRANKED.values()}
    for row in record.ranking:
        if row.kind in UNRANKED:
            listed[UNRANKED[row.kind]].setdefault(_why(row), []).append(row.mechanism)
    return {title: [(", ".join(each), why) for why, each in rows.items()] for title, rows in listed.items() if rows}


def _why(row: Row) -> str:
    speed = "" if row.ratio is None else f"{factor(row.ratio)}, "
    return f"{speed}{row.note}"


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
    return words


def shown(record: Advised) -> list[Table | Text | str]:
    """The advice on the terminal."""
    parts: list[Table | Text | str] = [
        Text(words, style="" if number else "bold") for number, words in enumerate(record.advice["words"])
    ]
    parts += ["", ranking(record)]
    for title, lines in unranked(record).items():
        parts += ["", f"{title}:", *(f"  {name}: {why}" for name, why in lines)]
    if record.meta.get("transfer"):
        parts += ["", transfers(record)]
    return [*parts, Text("\n" + "\n".join(measured(record)), style="dim")]


def html(record: Advised) -> str:
    """The page."""
    meta = record.meta
    words = [Words(each, "lead") for each in record.advice["words"]]
    tried = [Words(transfers(record).title + "."), transfers(record)] if meta.get("transfer") else []
    facts: dict[str, Any] = {
        "Asked": f"{meta['length']:,} tokens, a median error of {percent(meta['budget'])} at most",
        "Measured": " ".join(measured(record)),
    }
    sections = [
        Section("Advice", [*words, *_points(record)]),
        Section("Ranking", [ranking(record)]),
        Section("After a short transfer", tried),
        *(Section(title, [Listing(lines)]) for title, lines in unranked(record).items()),
        Section("Times and memory", [Folded("Every time and peak", report.every(record))]),
        pages.run(meta, facts),
        pages.again(meta, record.data),
    ]
    where = pages.where(meta, f"{meta['source']}, {meta['length']:,} tokens")
    return pages.page("advise", sections, [*pages.partial(meta, "advice"), where])


def _points(record: Advised) -> list[Block]:
    """Error against speed at the length asked for."""
    length = record.meta["length"]
    known = (row for row in record.ranking if row.error_length == length and row.ratio is not None)
    points = [Point(r.mechanism, 1 / (r.ratio or math.inf), r.median_error or 0.0) for r in known]
    if len(points) < 2:
        return []
    passes = "forward pass" if record.meta["pass"] == "forward" else "forward and backward pass"
    picture = pictures.scatter(Tradeoff(points, length), record.meta["budget"])
    return [Figure(picture, f"Error against speed at {length:,} tokens, a {passes}. {_POINTS}", "small")]
