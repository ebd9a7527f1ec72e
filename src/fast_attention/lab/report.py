"""One self-contained HTML page out of a record: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import shlex
from html import escape
from pathlib import Path
from typing import Any

from fast_attention import catalogue, files
from fast_attention.lab import pictures, verdicts
from fast_attention.lab.numbers import amount, bytes_of, digits, factor, milliseconds, percent
from fast_attention.lab.pictures import Picture, Quantity
from fast_attention.lab.records import EXACT, Cell, Comparison
from fast_attention.lab.tables import footnotes
from fast_attention.lab.tradeoff import scatter, tradeoff

PASSES: tuple[verdicts.Pass, ...] = ("forward", "training")
_PAGE = Path(__file__).with_name("report.html")


def save(record: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write records.json and report.html into ``folder``, each whole or not at all; their paths."""
    data, page = folder / "records.json", folder / "report.html"
    record.save(data)
    files.write(page, html(record))
    return data, page


def html(record: Comparison) -> str:
    """The page."""
    body = "\n".join([
        _warnings(record), _verdict(record), _table(record), _sizes(record), _growth(record), _errors(record),
        _matrices(record), _each(record), _cannot(record), _notes(record), _run(record), _again(record),
    ])  # fmt: skip
    return page("compare", body)


def page(command: str, body: str) -> str:
    """A page of a command around its sections."""
    text = _PAGE.read_text(encoding="utf-8").replace("<!-- command -->", command)
    return text.replace("<!-- body -->", body)


def section(title: str, *parts: str) -> str:
    """A part of the page under a heading."""
    return f"<section><h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _run(record: Comparison) -> str:
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
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows.items())
    return section("What was run", f"<dl>{cells}</dl>")


def _warnings(record: Comparison) -> str:
    meta, status = record.meta, record.meta["status"]
    warning = "" if status == "complete" else f"<p class=warn>This comparison was {escape(status)}: it is partial.</p>"
    load = max((meta[when] or [0.0])[0] for when in ("load_average", "load_average_after"))
    if load > meta["cores"] + 0.5:
        busy = f"The machine was busy with other work (load {load} on {meta['cores']} cores): times are uncertain."
        warning += f"<p class=warn>{escape(busy)}</p>"
    return f"{warning}<p>{escape(meta['source'])}; {escape(meta['hardware'])}, {meta['threads']} threads.</p>"


def _verdict(record: Comparison) -> str:
    said = "".join(f"<p class=lead>{escape(words)}</p>" for words in verdicts.headline(record))
    found = tradeoff(record)
    if found is None:
        return section("Verdict", said)
    caption = (
        f"Error against speed, {found.where}, a forward pass. The green line joins what is worth having: whatever lies "
        "off it is beaten in both by something on it. What must be trained first has no error to show."
    )
    return section("Verdict", figure(scatter(found), caption, "small"), said)


def _each(record: Comparison) -> str:
    names = [name for name in verdicts.order(record) if name != EXACT]
    rows = "".join(
        f"<li><code>{escape(name)}</code> {escape(verdicts.sentence(record, catalogue.parse(name)))}</li>"
        for name in names
    )
    return section("Each in a sentence", f"<ul class=each>{rows}</ul>")


_READING = """<p>The fastest at the greatest length stand first, exact attention where its own time puts it. Speed is
exact attention's time divided by the mechanism's, forward pass, median over interleaved rounds, and below it the middle
half of the rounds: above 1 is faster (green), below 1 slower (red), and grey is about equal, within noise. Errors are
relative RMS against exact attention, at the greatest length the model reads. A whole-token mixer has no queries, keys
and values: it is timed on tokens of the same width against the same exact attention, whose projections are not counted.
Hover over a dash for its reason, over a speed for its time.</p>"""


def _table(record: Comparison) -> str:
    lengths = record.meta["lengths"]
    heads = ["mechanism", "error, median head", "error, worst head"]
    heads += [f"speed at {length:,}" for length in lengths] + ["faster", "faster in training"]
    rows = []
    for name in verdicts.order(record):
        cells = "".join(_speed(record.cell(name, length) or Cell(name, length)) for length in lengths)
        if name == EXACT:
            start = f"<tr class=exact><th scope=row>{EXACT}</th><td colspan=2>the reference</td>"
            rows.append(f"{start}{cells}<td></td><td></td></tr>")
        else:
            wins = "".join(f"<td class=words>{escape(verdicts.wins(record, name, which))}</td>" for which in PASSES)
            rows.append(f"<tr><th scope=row>{escape(name)}</th>{_error_cells(record, name)}{cells}{wins}</tr>")
    return section("Error and speed", _READING, _wide(heads, rows))


def _sizes(record: Comparison) -> str:
    """Memory and the like, at the greatest length."""
    last = record.meta["lengths"][-1]
    heads = ["mechanism", "peak memory", "operations", "decoding state", "weights"]
    heads.append(f"error of the matrix at {_matrix_length(record)}")
    rows = []
    cells = [record.cell(name, last) or Cell(name, last) for name in verdicts.order(record)]
    for cell in sorted(cells, key=lambda cell: cell.peak_bytes or float("inf")):
        costs = [
            bytes_of(cell.peak_bytes),
            amount(cell.operations),
            bytes_of(cell.state_bytes),
            bytes_of(cell.weight_bytes),
        ]
        costs.append(_matrix_error(record, cell.mechanism))
        said = "".join(f"<td>{escape(text)}</td>" for text in costs)
        kind = " class=exact" if cell.mechanism == EXACT else ""
        rows.append(f"<tr{kind}><th scope=row>{escape(cell.mechanism)}</th>{said}</tr>")
    reading = (
        f"<p>At {last:,} tokens, the least memory first. Peak memory is what one pass holds beyond its inputs"
        f"{' (forward and backward)' if record.meta['backward'] else ''}; the state is what decoding keeps.</p>"
    )
    return section("Memory and work", reading, _wide(heads, rows))


def _wide(heads: list[str], rows: list[str]) -> str:
    """A table that scrolls where the page is narrower."""
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div class=wide tabindex=0>{table}</div>"


def _matrix_length(record: Comparison) -> str:
    return next((f"{error.length:,}" for error in record.errors if error.matrix), "-")


def _matrix_error(record: Comparison, name: str) -> str:
    measured = [e for e in record.errors if e.mechanism == name and e.matrix]
    found = measured[-1].summary("matrix") if measured else None
    return percent(found[0]) if found else "-"


def _error_cells(record: Comparison, name: str) -> str:
    mechanism: Any = catalogue.parse(name)
    error = record.error(name)
    output = error.summary() if error else None
    if mechanism.traits.approximates is None:
        return f"<td colspan=2 class=none>{escape(verdicts.kind(mechanism))}</td>"
    if error is None or output is None:
        return "<td colspan=2 class=none>not measured</td>"
    against = "" if error.against == "Softmax" else f" vs {error.against}"
    said = [percent(output[0]) + against, percent(output[1])]
    return "".join(f"<td>{escape(text)}</td>" for text in said)


def _speed(cell: Cell) -> str:
    if cell.forward_ratio is None or cell.forward_ms is None:
        return f'<td title="{escape(f"{cell.status}: {cell.note}")}">-</td>'
    if cell.mechanism == EXACT:
        return f"<td>{milliseconds(cell.forward_ms)}</td>"
    kind = "even" if verdicts.even(cell) else "fast" if cell.forward_ratio < 1 else "slow"
    details = f"{milliseconds(cell.forward_ms)}, {cell.rounds} rounds{', about equal' if kind == 'even' else ''}"
    spread = (
        ""
        if cell.forward_high is None or cell.forward_low is None
        else (f"<small>{digits(1 / cell.forward_high)} to {digits(1 / cell.forward_low)}</small>")
    )
    return f'<td class={kind} title="{details}">{factor(cell.forward_ratio)}{spread}</td>'


def figure(picture: Picture, caption: str, kind: str = "") -> str:
    """A picture with its caption; ``"small"`` where it is no wider than a page of text."""
    return f"<figure{kind and f' class={kind}'}>{picture.svg}<figcaption>{escape(caption)}</figcaption></figure>"


_LINE = "The dark line is exact attention; green is where the mechanism beats it."
_DOTS = "The dotted line and its number mark the crossover, interpolated between the measured lengths."


def _growth(record: Comparison) -> str:
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


def _against_length(record: Comparison, title: str, quantity: Quantity, crossed: pictures.Crossed = None) -> str:
    alt = f"{title} against length, a panel per mechanism. {_LINE}"
    picture = pictures.growth(record, quantity, "milliseconds" if crossed else "MiB", alt, crossed)
    return figure(picture, f"{title}. {_LINE} {_DOTS if crossed else ''}")


def _errors(record: Comparison) -> str:
    shown = [error for name in record.mechanisms if (error := record.error(name)) is not None]
    length = max((error.length for error in shown), default=0)
    shown = [error for error in shown if error.length == length]
    if not shown:
        return ""
    caption = f"Relative RMS error of every head's output at {length:,} tokens; on the right median and worst."
    return section("Error of every head", figure(pictures.heat(shown, record.meta["layers"]), caption))


def _matrices(record: Comparison) -> str:
    held = record.matrices
    if held is None:
        return ""
    picture = pictures.matrices(held.exact, held.approximate, held.where)
    caption = (
        f"{held.where}. Rows are queries, columns keys; one colour scale (square root); negative weights shown as 0."
    )
    return section("Attention matrices", figure(picture, caption))


def _cannot(record: Comparison) -> str:
    rows = ""
    for name in sorted(record.mechanisms):
        denied = ", ".join(verdicts.cannot(catalogue.parse(name))) or "-"
        rows += f"<tr><th scope=row>{escape(name)}</th><td>{escape(denied)}</td></tr>"
    return section(
        "What each cannot do", f"<div class=wide tabindex=0><table class=plain><tbody>{rows}</tbody></table></div>"
    )


def _notes(record: Comparison) -> str:
    rows = "".join(f"<li>{escape(note)}</li>" for note in footnotes(record))
    return section("Not measured", f"<ul>{rows}</ul>") if rows else ""


def _again(record: Comparison) -> str:
    command = escape(shlex.join(record.meta["command"]))
    return section("How to reproduce", f"<pre>{command}</pre>", "<p>All numbers: records.json beside this page.</p>")
