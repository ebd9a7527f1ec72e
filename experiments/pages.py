"""Pages of the newest record of each reproduction, and a picture of what language models learn; for docs/build.py."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.figure import Figure

from experiments.reproductions import NAMES
from experiments.reproductions.common import Reproduced, Reproduction
from experiments.study import EXACT, Study, label
from fast_attention.lab.pictures import COLOURS, GRID, INK, STYLE, svg

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def page(chosen: Reproduction, record: Reproduced, source: Path) -> str:
    """The page of a record: the sentence first, then tables, picture, reasons, and how it was measured."""
    meta, verdicts = record.meta, {True: "**agrees**", False: "disagrees", None: "not measured"}
    points = sorted(chosen.claims(record), key=lambda claim: claim.holds is not False)  # disagreement first
    claims = [[claim.paper, claim.ours, verdicts[claim.holds]] for claim in points]
    parts = [
        f"# {chosen.title}", chosen.sentence(record), f"*{chosen.paper}.*",
        f"![{chosen.picture(record)[1]}]({chosen.name}.svg)",
        "## Point by point", table(["it is said that", "here", "verdict"], claims),
    ]  # fmt: skip
    for each in chosen.tables(record):
        parts += [f"## {each.title}", table(each.heads, each.rows)]
    parts += ["## Why they differ", "\n".join(f"- {reason}" for reason in chosen.why(record))]
    measured = {
        "day": f"{meta['started'][:10]}, {meta['seconds']:,.0f} s",
        "machine": f"{meta['hardware']}, {meta['threads']} of {meta['cores']} threads",
        "load average": f"{meta['load_average']} before, {meta['load_average_after']} after",
        "versions": f"fast-attention {meta['fast_attention']} ({meta['commit']}), torch {meta['torch']}, "
        f"Python {meta['python']}",
        "record": f"`{source.relative_to(ROOT)}`",
    }
    if meta["command"][0] != "python":
        measured["command of then"] = f"`{shlex.join(meta['command'])}`"
    parts += [
        "## How to measure it again", f"```\n{command(chosen, meta['command'])}\n```",
        table(["measured", ""], ([name, value] for name, value in measured.items())),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def command(chosen: Reproduction, recorded: list[str]) -> str:
    """The command that repeats a record; those of before 28 November 2026 begin with ``fast-attention reproduce``."""
    begins = 3  # behind `python -m MODULE`, or behind `fast-attention reproduce NAME`
    options = [option for option in recorded[begins:] if option not in ("--resume", "--restart")]
    return shlex.join(["python", "-m", f"experiments.reproductions.{chosen.name}", *options])


def overview(records: Iterable[tuple[Reproduction, Reproduced, Path]]) -> str:
    """The closing table: a row for every record."""
    groups: dict[str, list[list[str]]] = {"What a mechanism learns or keeps": [], "Time, and published packages": []}
    for chosen, record, _ in records:
        claims = chosen.claims(record)
        agree = f"{sum(claim.holds is True for claim in claims)} of {len(claims)}"
        wrong = "; ".join(claim.paper for claim in claims if claim.holds is False)
        group = [*groups][chosen.name in ("leaks", "cab", "decoding")]
        groups[group].append(
            [f"[{chosen.title}](reproductions/{chosen.name}.md) ({chosen.paper})", agree, wrong or "-"]
        )
    heads = ["reproduction", "points that agree", "points that the record disagrees with"]
    held = "\n\n".join(f"## {title}\n\n{table(heads, rows)}" for title, rows in groups.items() if rows)
    words = (
        "Papers' figures and tables, measured here. Each has a script in `experiments/reproductions` that runs from a "
        "clone: `python -m experiments.reproductions.NAME`. By default it takes at most 30 minutes on two cores. "
        "Published numbers are the papers', ours are of the newest record. Each page begins with the points that "
        "disagree."
    )
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(f"reproductions/{row[0].name}" for row in records), "```"])
    return "\n\n".join(["# Reproductions", words, held, toctree]) + "\n"


def newest(name: str) -> Path | None:
    """The last record of a study or a reproduction."""
    records = ROOT / "records"
    found = [*records.glob(f"????-??-??-{name}.json"), *records.glob(f"????-??-??-{name}-[0-9].json")]
    return max(found, key=lambda path: (path.name[:10], path.stem), default=None)


def learned(study: Study, other: Study, also: str = "WKV()") -> str:
    """Bits per byte against minutes of training, all of a study and one mechanism of another, as SVG."""
    lines, labels = dict[str, dict[float, float]](), dict[str, str]()
    for held, names in ((study, study.meta["mechanisms"]), (other, [also])):
        for name in names:
            runs = held.of(name)
            points = [*held.curve(name).items()][1:]  # an untrained model is off the scale
            points.append((fmean(r.curve[-1][1] / 60 for r in runs), fmean(r.curve[-1][2] for r in runs)))
            lines[name] = dict(points)
            labels[name] = f"{label(name)}: {points[-1][1]:.2f}, {fmean(r.steps for r in runs):,.0f} steps"
    lines = dict(sorted(lines.items(), key=lambda line: -[*line[1].values()][-1]))
    meta, longest = study.meta, max(max(line) for line in lines.values())
    colours, above = iter(COLOURS), float("inf")
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for name, line in lines.items():
            colour, above = INK if name == EXACT else next(colours), min([*line.values()][-1], above / 1.02)
            axes.plot([*line], [*line.values()], color=colour, linewidth=2.4 if name == EXACT else 1.6)
            beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
            axes.annotate(labels[name].replace(", far", ",\n  far"), (longest, above), color=colour, **beside)
        axes.margins(x=0.02)
        axes.grid(color=GRID, linewidth=0.5)
        axes.set_xlabel("minutes of training, the same for all")
        axes.set_title(
            f"bits per byte of unseen text, lower is better; {meta['task']}, {meta['model']['layers']} layers of "
            f"{meta['model']['width']}, {meta['hardware']}, {meta['threads']} thread{'s' * (meta['threads'] > 1)}; "
            f"{', '.join(held.meta['started'][:10] for held in (study, other))}",
            fontweight="normal",
        )
        return svg(figure, f"Bits per byte after {longest:.0f} minutes: {'; '.join(labels[name] for name in lines)}.")


def of(picture: str, *records: Path) -> str:
    """A picture whose last line but one names its records and their SHA-256."""
    named = ", ".join(f"{path.name}: {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in records)
    return picture.replace("</svg>", f"<!-- {named} -->\n</svg>")


def made() -> dict[Path, str]:
    """The overview of reproductions, the page and the picture of each, and the picture of what is learnt of bytes."""
    scripts = [import_module(f"experiments.reproductions.{name}").REPRODUCTION for name in NAMES]
    sources = {each.name: path for each in scripts if (path := newest(f"reproduce-{each.name}"))}
    records = [(each, Reproduced.read(path), path) for each in scripts if (path := sources.get(each.name))]
    texts = {DOCS / "reproductions.md": overview(records)}
    for chosen, record, source in records:
        texts[DOCS / "reproductions" / f"{chosen.name}.md"] = page(chosen, record, source)
        texts[DOCS / "reproductions" / f"{chosen.name}.svg"] = of(chosen.picture(record)[0], source)
    if (first := newest("study-byte-lm")) and (second := newest("study-byte-lm-learned")):
        texts[DOCS / "learned.svg"] = of(learned(Study.read(first), Study.read(second)), first, second)
    return texts
