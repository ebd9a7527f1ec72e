"""What a conversion says: tables on the terminal and one self-contained HTML page."""

from __future__ import annotations

import shlex
from html import escape

from rich.table import Table
from rich.text import Text

from fast_attention.lab import report
from fast_attention.lab.converting import drawings
from fast_attention.lab.converting.record import SPELT, STAGES, Converted
from fast_attention.lab.numbers import bytes_of, factor, milliseconds
from fast_attention.lab.report import figure, section

Rows = list[list[str]]  # the head first


def stages(record: Converted) -> Rows:
    """What the model was worth at every stage, and how far its layers were off."""
    found = {when: record.figures(when) for when in record.stages}
    names = list(found["original"]) if found else []
    rows = [["", *(SPELT[name] for name in names), "mean error of a layer"]]
    for when, figures in found.items():
        errors = list(record.conversion.errors.get(when, {}).values())
        mean = f"{sum(errors) / len(errors):.3f}" if errors else "0"
        rows.append([STAGES[when], *(f"{figures[name]:.4f}" for name in names), mean])
    return rows


def layers(record: Converted) -> Rows:
    """What every layer runs, its error at every stage, and the loss if that layer alone were as it was."""
    held = record.conversion
    measured = [when for when in STAGES if when in held.errors]
    rows = [["layer", "runs", *(f"error, {STAGES[when]}" for when in measured), f"loss if {record.untouched}"]]
    for name in held.layers:
        runs = held.mechanism if name in held.converted else f"{record.before(name)}: {held.kept[name]}"
        errors = [held.errors[when].get(name) for when in measured]
        loss = held.put_back.get(name)
        said = ["-" if error is None else f"{error:.3f}" for error in errors]
        rows.append([name, runs, *said, "-" if loss is None else f"{loss:.4f}"])
    return rows


def prices(record: Converted) -> Rows:
    """Time and memory of a forward pass before and after, at every length."""
    heads = ["tokens", "original", "converted", "speed", "attention", "converted", "speed", "memory", "converted"]
    rows = [heads]
    by_length: dict[int, list[dict[str, float]]] = {}
    for row in record.prices:
        by_length.setdefault(row["length"], []).append(row)
    for length, pair in by_length.items():
        cells = [f"{length:,}"]
        for name in ("seconds", "attention_seconds"):
            times = [row.get(name) for row in pair]
            cells += ["-" if time is None else milliseconds(1000 * time) for time in times]
            before, after = times
            cells.append("-" if before is None or after is None else factor(after / before))
        sizes = [row.get("bytes") for row in pair]
        rows.append([*cells, *(bytes_of(None if size is None else int(size)) for size in sizes)])
    return rows


def words(record: Converted) -> list[str]:
    """The choice of layers in words."""
    held, budget = record.conversion, record.meta["budget"]
    if not held.put_back or held.whole is None:
        return []
    best = min(held.put_back, key=lambda name: held.put_back[name])
    said = [
        f"Measured after the transfer, on passages of their own: loss {held.whole:.4f}; best left {record.untouched} "
        f"is {best}, with which it is {held.put_back[best]:.4f}."
    ]
    if budget is not None and held.limit is not None:
        chosen = ", then ".join(f"{name} (loss {loss:.4f})" for name, loss in held.chosen.items())
        kept = f"{record.untouched} stay {chosen}" if chosen else f"no layer needs to stay {record.untouched}"
        said.append(f"Budget {budget:g}, a loss of {held.limit:.4f}: {kept}. Chosen before the fine-tune.")
    return said


def tables(record: Converted) -> list[Table]:
    """All of it for the terminal."""
    return [_table(rows) for rows in (stages(record), layers(record), prices(record)) if len(rows) > 1]


def _table(rows: Rows) -> Table:
    made = Table(box=None, header_style="bold", pad_edge=False)
    for number, head in enumerate(rows[0]):
        made.add_column(head, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows[1:]:
        made.add_row(*(Text(part) for part in row))
    return made


def html(record: Converted) -> str:
    """The page."""
    held, parts = record.conversion, [_run(record)]
    if record.stages:
        said = "The original is the line; the budget, where there is one, is dotted."
        lead = "".join(f"<p class=lead>{escape(each)}</p>" for each in words(record))
        parts.append(section("What it is worth", figure(drawings.stages(record), said), _html(stages(record))))
        said = "Left: squared error of a layer's output over its variance, on the original's own inputs; right: the "
        said += "loss with this layer alone put back to the original's."
        parts.append(section("Layer by layer", lead, figure(drawings.layers(record), said), _html(layers(record))))
    if record.prices:
        said = "Forward passes of one sequence, interleaved. Beyond the model's positions their numbers begin anew, "
        said += "which tells times and no quality. Attention: the modules with their projections."
        parts.append(section("What it costs", figure(drawings.prices(record), said), _html(prices(record))))
    if held.curves:
        parts.append(section("While training", figure(drawings.curves(record), "Running means of the losses.")))
    again = f"<pre>{escape(shlex.join(record.meta['command']))}</pre>"
    opens = escape(record.meta.get("opened_by", "fast_attention.from_pretrained"))
    again += f"<p>The model: {opens} on this folder. All numbers: report.json beside this page.</p>"
    return report.page("convert", "\n".join([*parts, section("Again", again)]))


def _html(rows: Rows) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        f"<tr><th scope=row>{escape(row[0])}</th>" + "".join(f"<td>{escape(part)}</td>" for part in row[1:]) + "</tr>"
        for row in rows[1:]
    )
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _run(record: Converted) -> str:
    meta, held = record.meta, record.conversion
    warning = "" if held.status == "complete" else f"<p class=warn>This conversion was {escape(held.status)}.</p>"
    told = {
        "Model": f"{meta['model']}, {len(held.layers)} attention layers, {len(held.converted)} converted",
        "Mechanism": held.mechanism,
        "Judged by": f"{held.goal}, {meta['passages']} passages of {meta['length']} tokens that no training saw",
        "Text": meta["text"],
        "Training": f"{meta['settings']}, {meta['batch_size']} passages a batch",
        "Budget": "none" if meta["budget"] is None else f"{meta['budget']:g} times the original's loss",
        "Loss": meta["loss"],
        "Machine": f"{meta['hardware']}, {meta['device']}, {meta['threads']} of {meta['cores']} threads, "
        f"load average {meta['load_average']} at the start",
        "Versions": f"fast-attention {meta['fast_attention']} ({meta['commit'] or 'no commit known'}), "
        f"torch {meta['torch']}, transformers {meta['transformers'] or 'not used'}, Python {meta['python']}, "
        f"{meta['platform']}",
        "When": f"{meta['started']} to {meta.get('finished', 'unfinished')}",
    }
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in told.items())
    return warning + section("What was run", f"<dl>{cells}</dl>")
