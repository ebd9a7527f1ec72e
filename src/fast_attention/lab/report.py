"""One self-contained HTML page out of a record: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import shlex
from html import escape
from pathlib import Path
from typing import Any

from fast_attention import catalogue, files
from fast_attention.lab import pictures, verdicts
from fast_attention.lab.pictures import Picture, Quantity
from fast_attention.lab.records import EXACT, Cell, Record
from fast_attention.lab.tables import amount, bytes_of, factor, footnotes, milliseconds

_PAGE = Path(__file__).with_name("report.html")


def save(record: Record, folder: Path) -> tuple[Path, Path]:
    """Write records.json and report.html into ``folder``, each whole or not at all; their paths."""
    data, page = folder / "records.json", folder / "report.html"
    files.write(data, record.to_json() + "\n")
    files.write(page, html(record))
    return data, page


def html(record: Record) -> str:
    """The page."""
    body = "\n".join([
        _run(record), _verdict(record), _table(record), _growth(record), _errors(record), _matrices(record),
        _cannot(record), _notes(record), _again(record),
    ])  # fmt: skip
    return page("compare", body)


def page(command: str, body: str) -> str:
    """A page of a command around its sections."""
    text = _PAGE.read_text(encoding="utf-8").replace("<!-- command -->", command)
    return text.replace("<!-- body -->", body)


def section(title: str, *parts: str) -> str:
    """A part of the page under a heading."""
    return f"<section><h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _run(record: Record) -> str:
    meta = record.meta
    lengths = ", ".join(f"{length:,}" for length in meta["lengths"])
    rows = {
        "Tensors": meta["source"],
        "Errors on": "; ".join(meta.get("error_tensors", {}).values()) or "nothing yet",
        "Times on": f"Gaussian tensors of the same {meta['heads']} heads of width {meta['head_dim']}, one sequence of "
        f"{lengths} tokens, {meta['dtype']}",
        "Direction": "causal" if meta["causal"] else "bidirectional",
        "Exact attention": "torch's fused scaled_dot_product_attention, in the same process and the same rounds",
        "Machine": f"{meta['hardware']}, {meta['device']}, {meta['threads']} of {meta['cores']} threads, "
        f"load average {meta['load_average']} before and {meta['load_average_after']} after",
        "Versions": f"fast-attention {meta['fast_attention']} ({meta['commit'] or 'no commit known'}), "
        f"torch {meta['torch']}, Python {meta['python']}, {meta['platform']}",
        "When": f"{meta['started']} to {meta.get('finished', 'unfinished')}, seed {meta['seed']}",
    }
    status = meta["status"]
    warning = "" if status == "complete" else f"<p class=warn>This comparison was {escape(status)}: it is partial.</p>"
    load = max((meta[when] or [0.0])[0] for when in ("load_average", "load_average_after"))
    if load > meta["cores"] + 0.5:
        busy = f"The machine was busy with other work (load {load} on {meta['cores']} cores): times are uncertain."
        warning += f"<p class=warn>{escape(busy)}</p>"
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows.items())
    return warning + section("What was run", f"<dl>{cells}</dl>")


def _verdict(record: Record) -> str:
    said = "".join(f"<p class=lead>{escape(words)}</p>" for words in verdicts.headline(record))
    each = "".join(
        f"<li><code>{escape(name)}</code> {escape(verdicts.sentence(record, catalogue.parse(name)))}</li>"
        for name in record.mechanisms
    )
    return section("Verdict", said, f"<ul class=each>{each}</ul>")


_READING = """<p>Speed is exact attention's time divided by the mechanism's, forward pass, median over interleaved
rounds: above 1 is faster (green), below 1 slower (red). Errors are relative RMS against exact attention, at the
greatest length the model reads. A whole-token mixer has no queries, keys and values: it is timed on tokens of the same
width against the same exact attention, whose projections are not counted. Peak memory is what one pass holds beyond its
inputs (forward and backward where that was measured). Hover over a dash for its reason, over a speed for its
time.</p>"""


def _table(record: Record) -> str:
    lengths = record.meta["lengths"]
    heads = ["mechanism", "error, median head", "error, worst head", f"matrix error at {_matrix_length(record)}"]
    heads += [f"speed at {length:,}" for length in lengths] + ["wins forward", "wins training"]
    heads += [f"peak memory at {lengths[-1]:,}", "operations", "decoding state", "weights"]
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in heads)
    rows = "".join(_row(record, name) for name in (EXACT, *record.mechanisms))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return section("Table", _READING, f"<div class=wide>{table}</div>")


def _matrix_length(record: Record) -> str:
    return next((f"{error.length:,}" for error in record.errors if error.matrix), "-")


def _row(record: Record, name: str) -> str:
    cells = [record.cell(name, length) or Cell(name, length) for length in record.meta["lengths"]]
    speeds, last = "".join(map(_speed, cells)), cells[-1]
    known = (
        bytes_of(last.peak_bytes),
        amount(last.operations),
        bytes_of(last.state_bytes),
        bytes_of(last.weight_bytes),
    )
    costs = "".join(f"<td>{escape(text)}</td>" for text in known)
    if name == EXACT:
        start = f"<tr class=exact><th scope=row>{EXACT}</th><td colspan=3>the reference</td>"
        return f"{start}{speeds}<td></td><td></td>{costs}</tr>"
    wins = "".join(f"<td>{escape(verdicts.wins(record, name, which))}</td>" for which in ("forward", "training"))
    return f"<tr><th scope=row>{escape(name)}</th>{_error_cells(record, name)}{speeds}{wins}{costs}</tr>"


def _error_cells(record: Record, name: str) -> str:
    mechanism: Any = catalogue.parse(name)
    error = record.error(name)
    output = error.summary() if error else None
    if mechanism.traits.approximates is None:
        return f"<td colspan=3 class=none>{escape(verdicts.kind(mechanism))}</td>"
    if error is None or output is None:
        return "<td colspan=3 class=none>not measured</td>"
    measured = [e for e in record.errors if e.mechanism == name and e.matrix]
    matrix = measured[-1].summary("matrix") if measured else None
    against = "" if error.against == "Softmax" else f" vs {error.against}"
    said = [verdicts.percent(output[0]) + against, verdicts.percent(output[1])]
    said.append(verdicts.percent(matrix[0]) if matrix else "-")
    return "".join(f"<td>{escape(text)}</td>" for text in said)


def _speed(cell: Cell) -> str:
    if cell.forward_ratio is None or cell.forward_ms is None:
        return f'<td title="{escape(f"{cell.status}: {cell.note}")}">-</td>'
    if cell.mechanism == EXACT:
        return f"<td>{milliseconds(cell.forward_ms)}</td>"
    kind = "fast" if cell.forward_ratio < 1 else "slow"
    details = f"{milliseconds(cell.forward_ms)}, {cell.rounds} rounds"
    return f'<td class={kind} title="{details}">{factor(cell.forward_ratio)}</td>'


def figure(picture: Picture, caption: str) -> str:
    """A picture with its caption."""
    return f"<figure>{picture.svg}<figcaption>{escape(caption)}</figcaption></figure>"


_LINE = "The dark line is exact attention; green is where the mechanism beats it."
_DOTS = "The dotted line and its number mark the crossover, interpolated between the measured lengths."


def _growth(record: Record) -> str:
    if verdicts.longest(record) is None:
        return ""
    backward = record.meta["backward"]
    figures = [_against_length(record, "Time of a forward pass", lambda cell: cell.forward_ms, "forward")]
    if backward:
        title = "Time of a forward and backward pass"
        figures.append(_against_length(record, title, lambda cell: cell.training_ms, "training"))
    title = f"Peak memory of a forward {'and backward ' if backward else ''}pass"
    memory = _against_length(record, title, lambda cell: cell.peak_bytes and cell.peak_bytes / 2**20)
    return section("Time against length", *figures) + section("Memory against length", memory)


def _against_length(record: Record, title: str, quantity: Quantity, crossed: pictures.Crossed = None) -> str:
    alt = f"{title} against length, a panel per mechanism. {_LINE}"
    picture = pictures.growth(record, quantity, "milliseconds" if crossed else "MiB", alt, crossed)
    return figure(picture, f"{title}. {_LINE} {_DOTS if crossed else ''}")


def _errors(record: Record) -> str:
    shown = [error for name in record.mechanisms if (error := record.error(name)) is not None]
    length = max((error.length for error in shown), default=0)
    shown = [error for error in shown if error.length == length]
    if not shown:
        return ""
    caption = f"Relative RMS error of every head's output at {length:,} tokens; on the right median and worst."
    return section("Error of every head", figure(pictures.heat(shown, record.meta["layers"]), caption))


def _matrices(record: Record) -> str:
    held = record.matrices
    if held is None:
        return ""
    picture = pictures.matrices(held.exact, held.approximate, held.where)
    caption = (
        f"{held.where}. Rows are queries, columns keys; one colour scale (square root); negative weights shown as 0."
    )
    return section("Attention matrices", figure(picture, caption))


def _cannot(record: Record) -> str:
    rows = ""
    for name in record.mechanisms:
        denied = ", ".join(verdicts.cannot(catalogue.parse(name))) or "-"
        rows += f"<tr><th scope=row>{escape(name)}</th><td>{escape(denied)}</td></tr>"
    return section("What each cannot do", f"<table class=plain><tbody>{rows}</tbody></table>")


def _notes(record: Record) -> str:
    rows = "".join(f"<li>{escape(note)}</li>" for note in footnotes(record))
    return section("Not measured", f"<ul>{rows}</ul>") if rows else ""


def _again(record: Record) -> str:
    command = escape(shlex.join(record.meta["command"]))
    return section("How to reproduce", f"<pre>{command}</pre>", "<p>All numbers: records.json beside this page.</p>")
