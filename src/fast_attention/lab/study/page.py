"""Shows a study: the table on the terminal and the page."""

from __future__ import annotations

from fast_attention.lab import pages
from fast_attention.lab.numbers import amount, bytes_of, milliseconds
from fast_attention.lab.pages import Figure, Section
from fast_attention.lab.study import drawings
from fast_attention.lab.study.plan import CONTROLS
from fast_attention.lab.study.record import Study
from fast_attention.lab.tables import Row, Table


def rows(record: Study) -> list[list[str]]:
    """The mechanisms, best mean first, and the baselines among them."""
    rising = record.meta["metric"] == "accuracy"
    exact = record.summary("Softmax()")
    ranked: list[tuple[float, list[str]]] = []
    for name in record.meta["mechanisms"]:
        summary = record.summary(name)
        if summary is None:
            failed = any(result.mechanism == name for result in record.results)
            words = "diverged" if failed else "not reached"
            ranked.append((float("-inf") if rising else float("inf"), [name, words, "", "0", "", "", ""]))
            continue
        spread = "" if summary.spread is None else f" ± {summary.spread:.4f}"
        gap = "" if exact is None or name == "Softmax()" else f"{summary.mean - exact.mean:+.4f}"
        title = f"{name}  ({CONTROLS[name]})" if name in CONTROLS else name
        cost = [milliseconds(1000 * summary.step_seconds), bytes_of(summary.peak_bytes), amount(summary.parameters)]
        ranked.append((summary.mean, [title, f"{summary.mean:.4f}{spread}", gap, str(summary.seeds), *cost]))
    for name, value in record.meta["baselines"].items():
        gap = "" if exact is None else f"{value - exact.mean:+.4f}"
        ranked.append((value, [f"baseline: {name}", f"{value:.4f}", gap, "", "", "", ""]))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0], reverse=rising)]


def table(record: Study) -> Table:
    """The study in rows."""
    metric = str(record.meta["metric"])
    heads = ["mechanism", metric, "against exact", "seeds", "a step", "peak of a step", "parameters"]
    return Table(heads, [Row(row, "pale" if row[0].startswith("baseline") else "") for row in rows(record)])


def html(record: Study) -> str:
    """The page."""
    meta = record.meta
    facts = {
        "Task": meta["task"],
        "Matched": "task, data and their order, steps, and number of parameters (by the width of the feed-forward "
        "layers)",
        "Training": meta["training"],
        "Model": ", ".join(f"{name}={value!r}" for name, value in meta["model"].items()) or "as by default",
    }
    sections = [pages.run(meta, facts)]
    if any(record.summary(name) for name in meta["mechanisms"]):
        caption = "Bars are 95 % intervals over the seeds; the pale line joins what nothing beats in both."
        curves = Figure(drawings.curves(record), "Means over the seeds; dotted: baselines.")
        sections += [
            Section("What is learnt, and at what cost", [Figure(drawings.costs(record), caption), table(record)]),
            Section("While training", [curves]),
        ]
    return pages.page("study", [*sections, pages.again(meta, record.data)], pages.partial(meta, "study"))
