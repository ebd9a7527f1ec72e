"""Shows a study: the table on the terminal and the page."""

from __future__ import annotations

from fast_attention.lab import pages
from fast_attention.lab.numbers import amount, bytes_of, milliseconds
from fast_attention.lab.pages import Figure, Section
from fast_attention.lab.study import drawings
from fast_attention.lab.study.plan import CONTROLS, label
from fast_attention.lab.study.record import Study
from fast_attention.lab.tables import Row, Table

EQUAL = {
    "steps": "the same number of steps",
    "minutes": "the same time, evaluations included",
    "steps or minutes": "at most the same number of steps and the same time",
}


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
            ranked.append((float("-inf") if rising else float("inf"), [name, words, "", "0", "", "", "", ""]))
            continue
        spread = "" if summary.spread is None else f" ± {summary.spread:.4f}"
        gap = "" if exact is None or name == "Softmax()" else f"{summary.mean - exact.mean:+.4f}"
        title = f"{name}  ({CONTROLS[name]})" if name in CONTROLS else name
        cost = [milliseconds(1000 * summary.step_seconds), bytes_of(summary.peak_bytes), amount(summary.parameters)]
        ranked.append(
            (summary.mean, [title, f"{summary.mean:.4f}{spread}", gap, str(summary.seeds), f"{summary.steps:,}", *cost])
        )
    for name, value in record.meta["baselines"].items():
        gap = "" if exact is None else f"{value - exact.mean:+.4f}"
        ranked.append((value, [f"baseline: {name}", f"{value:.4f}", gap, "", "", "", "", ""]))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0], reverse=rising)]


def table(record: Study) -> Table:
    """The study in rows."""
    metric = str(record.meta["metric"])
    heads = ["mechanism", metric, "against exact", "seeds", "steps", "a step", "peak of a step", "parameters"]
    body = [Row(row, "pale" if row[0].startswith("baseline") else "") for row in rows(record)]
    return Table(heads, body, title=f"Every run had {EQUAL[record.equal]}")


def by_position(record: Study) -> Table | None:
    """The loss of each mechanism in each bucket of positions, or None where no run has it."""
    losses = {name: held for name in record.meta["mechanisms"] if (held := record.by_position(name))}
    if not losses:
        return None
    buckets = sorted({bucket for held in losses.values() for bucket in held})
    heads = ["mechanism", *(f"{first:,} to {last:,}" for first, last in buckets)]
    body = [[label(name), *(f"{held[b]:.4f}" if b in held else "" for b in buckets)] for name, held in losses.items()]
    return Table(heads, body, title=f"{record.meta['metric']} by position in the context")


def tables(record: Study) -> list[Table | str]:
    """All tables, for the terminal."""
    positions = by_position(record)
    return [table(record), *(["", positions] if positions else [])]


def html(record: Study) -> str:
    """The page."""
    meta = record.meta
    facts = {
        "Task": meta["task"],
        "Matched": f"task, data and their order, and number of parameters (by the width of the feed-forward layers); "
        f"every run had {EQUAL[record.equal]}",
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
    if positions := by_position(record):
        words = (
            "The same validation set, by where in the context a token is predicted; of each run's best model, means "
        )
        shown = Figure(drawings.by_position(record), words + "over the seeds. A line that falls gains from far back.")
        sections.append(Section("By position in the context", [shown, positions]))
    return pages.page("study", [*sections, pages.again(meta, record.data)], pages.partial(meta, "study"))
