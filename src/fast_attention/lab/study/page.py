"""What a study says: the table on the terminal and one self-contained HTML page."""

from __future__ import annotations

import shlex
from html import escape

from rich.table import Table
from rich.text import Text

from fast_attention.lab import report
from fast_attention.lab.numbers import amount, bytes_of, milliseconds
from fast_attention.lab.report import figure, section
from fast_attention.lab.study import drawings
from fast_attention.lab.study.plan import CONTROLS
from fast_attention.lab.study.record import Study

HEADS = ("mechanism", "", "against exact", "seeds", "a step", "peak of a step", "parameters")


def rows(record: Study) -> list[list[str]]:
    """The mechanisms, best mean first, and the baselines among them."""
    rising = record.meta["metric"] == "accuracy"
    exact = record.summary("Softmax()")
    found: list[tuple[float, list[str]]] = []
    for name in record.meta["mechanisms"]:
        summary = record.summary(name)
        if summary is None:
            failed = [r for r in record.results if r.mechanism == name]
            words = "diverged" if failed else "not reached"
            found.append((float("-inf") if rising else float("inf"), [name, words, "", "0", "", "", ""]))
            continue
        spread = "" if summary.spread is None else f" ± {summary.spread:.4f}"
        gap = "" if exact is None or name == "Softmax()" else f"{summary.mean - exact.mean:+.4f}"
        said = f"{name}  ({CONTROLS[name]})" if name in CONTROLS else name
        price = [milliseconds(1000 * summary.step_seconds), bytes_of(summary.peak_bytes), amount(summary.parameters)]
        found.append((summary.mean, [said, f"{summary.mean:.4f}{spread}", gap, str(summary.seeds), *price]))
    for name, value in record.meta["baselines"].items():
        gap = "" if exact is None else f"{value - exact.mean:+.4f}"
        found.append((value, [f"baseline: {name}", f"{value:.4f}", gap, "", "", "", ""]))
    return [row for _, row in sorted(found, key=lambda pair: pair[0], reverse=rising)]


def table(record: Study) -> Table:
    """The study on the terminal."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for number, head in enumerate(_heads(record)):
        made.add_column(head, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows(record):
        made.add_row(*(Text(part) for part in row), style="dim" if row[0].startswith("baseline") else "")
    return made


def html(record: Study) -> str:
    """The page."""
    parts = [_run(record)]
    if any(record.summary(name) for name in record.meta["mechanisms"]):
        said = "Bars are 95 % intervals over the seeds; the pale line joins what nothing beats in both."
        parts += [
            section("What is learnt, and at what price", figure(drawings.prices(record), said), _table(record)),
            section("While training", figure(drawings.curves(record), "Means over the seeds; dotted: baselines.")),
        ]
    again = f"<pre>{escape(shlex.join(record.meta['command']))}</pre>"
    return report.page("study", "\n".join([*parts, section("Again", again)]))


def _heads(record: Study) -> list[str]:
    return [head or str(record.meta["metric"]) for head in HEADS]


def _table(record: Study) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in _heads(record))
    body = "".join(
        f"<tr><th scope=row>{escape(row[0])}</th>" + "".join(f"<td>{escape(part)}</td>" for part in row[1:]) + "</tr>"
        for row in rows(record)
    )
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _run(record: Study) -> str:
    meta = record.meta
    status = meta["status"]
    warning = "" if status == "complete" else f"<p class=warn>This study was {escape(status)}: it is partial.</p>"
    told = {
        "Task": meta["task"],
        "Matched": "task, data and their order, steps, and number of parameters (by the width of the feed-forward "
        "layers)",
        "Training": meta["training"],
        "Model": ", ".join(f"{name}={value!r}" for name, value in meta["model"].items()) or "as by default",
        "Machine": f"{meta['hardware']}, {meta['device']}, {meta['threads']} of {meta['cores']} threads, "
        f"load average {meta['load_average']} at the start",
        "Versions": f"fast-attention {meta['fast_attention']} ({meta['commit'] or 'no commit known'}), "
        f"torch {meta['torch']}, Python {meta['python']}, {meta['platform']}",
        "When": f"{meta['started']} to {meta.get('finished', 'unfinished')}",
    }
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in told.items())
    return warning + section("What was run", f"<dl>{cells}</dl>")
