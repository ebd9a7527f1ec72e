"""Shows a study: the table on the terminal and the page."""

from __future__ import annotations

from fast_attention.catalogue import parse
from fast_attention.lab import pages
from fast_attention.lab.numbers import Number, amount, bytes_of, count, fixed, milliseconds
from fast_attention.lab.pages import Figure, Folded, Section, Words
from fast_attention.lab.study import drawings
from fast_attention.lab.study.plan import BESIDE, CONTROLS, EXACT, label
from fast_attention.lab.study.record import Study
from fast_attention.lab.tables import Row, Table

_CURVES = "Means over the seeds; dotted: baselines."
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
        gap = "" if exact is None or name == "Softmax()" else fixed(summary.mean - exact.mean, "+.4f")
        title = f"{name}  ({CONTROLS[name]})" if name in CONTROLS else name
        cost = [milliseconds(1000 * summary.step_seconds), bytes_of(summary.peak_bytes), amount(summary.parameters)]
        mean = Number(f"{summary.mean:.4f}{spread}", summary.mean)
        ranked.append((summary.mean, [title, mean, gap, count(summary.seeds), count(summary.steps), *cost]))
    for name, value in record.meta["baselines"].items():
        gap = "" if exact is None else fixed(value - exact.mean, "+.4f")
        ranked.append((value, [f"baseline: {name}", fixed(value, ".4f"), gap, "", "", "", "", ""]))
    return [row for _, row in sorted(ranked, key=lambda pair: pair[0], reverse=rising)]


def had(record: Study) -> str:
    """What every run had as much of, in words; at most that, where ``patience`` ended one early."""
    words, early = EQUAL[record.equal], any(result.status == "stopped early" for result in record.results)
    return f"at most {words}" if early and not words.startswith("at most") else words


def table(record: Study) -> Table:
    """The study in rows."""
    metric = str(record.meta["metric"])
    heads = ["mechanism", metric, "against exact", "seeds", "steps", "a step", "peak of a step", "parameters"]
    body = [Row(row, "pale" if row[0].startswith("baseline") else "") for row in rows(record)]
    return Table(heads, body, title=f"Every run had {had(record)}{shared_positions(record)}")


def shared_positions(record: Study) -> str:
    """What a comparison must know of positions, which are the same for all: who of them takes no rotary ones."""
    names = record.meta["mechanisms"]
    plain = [name for name in names if not all(parse(part).traits.rotary for part in name.split(BESIDE))]
    if record.meta["model"].get("positions") != "learned" or len(plain) in (0, len(names)):
        return ""
    return f", and learned positions (no rotary ones for {', '.join(plain)}, by which others may learn more)"


def by_position(record: Study) -> Table | None:
    """The loss of each mechanism in each bucket of positions, or None where no run has it."""
    losses = {name: held for name in record.meta["mechanisms"] if (held := record.by_position(name))}
    if not losses:
        return None
    buckets = sorted({bucket for held in losses.values() for bucket in held})
    heads = ["mechanism", *(f"{first:,} to {last:,}" for first, last in buckets)]
    body = [[label(name), *(fixed(held.get(b), ".4f") for b in buckets)] for name, held in losses.items()]
    return Table(heads, body, title=f"{record.meta['metric']} by position in the context")


def lead(record: Study) -> str:
    """The result in a sentence."""
    known = {name: summary for name in record.meta["mechanisms"] if (summary := record.summary(name))}
    rising = record.meta["metric"] == "accuracy"
    best = (max if rising else min)(known, key=lambda name: known[name].mean)
    exact = "" if best == EXACT or EXACT not in known else f"; exact attention has {known[EXACT].mean:.4f}"
    return f"The best mean {record.meta['metric']} is {known[best].mean:.4f}, of {label(best)}{exact}."


def while_training(record: Study) -> Table:
    """The numbers of the curves: a row for a mechanism and a point of time."""
    unit = "minutes" if record.equal == "minutes" else "steps"
    rows = [
        [label(name), Number(f"{at:,.3g}" if unit == "minutes" else f"{at:,.0f}", at), fixed(value, ".4f")]
        for name in record.meta["mechanisms"]
        for at, value in record.curve(name).items()
    ]
    return Table(["mechanism", unit, record.meta["metric"]], rows)


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
        f"every run had {had(record)}{shared_positions(record)}",
        "Training": meta["training"],
        "Model": ", ".join(f"{name}={value!r}" for name, value in meta["model"].items()) or "as by default",
    }
    sections = []
    if any(record.summary(name) for name in meta["mechanisms"]):
        caption = "Bars are 95 % intervals over the seeds; the pale line joins what nothing beats in both."
        costs, curves = Figure(drawings.costs(record), caption), Figure(drawings.curves(record), _CURVES)
        sections += [
            Section("What is learnt, and at what cost", [Words(lead(record), "lead"), costs, table(record)]),
            Section("While training", [curves, Folded("Every point of the curves", while_training(record))]),
        ]
    if positions := by_position(record):
        words = (
            "The same validation set, by where in the context a token is predicted; of each run's best model, means "
        )
        shown = Figure(drawings.by_position(record), words + "over the seeds. A line that falls gains from far back.")
        sections.append(Section("By position in the context", [shown, positions]))
    intro = [
        *pages.partial(meta, "study"),
        pages.where(meta, f"{meta['task']}, {meta['seeds']} runs of each mechanism"),
    ]
    return pages.page("study", [*sections, pages.run(meta, facts), pages.again(meta, record.data)], intro)
