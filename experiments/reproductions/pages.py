"""Pages of the newest record of each reproduction: docs/reproductions.md and docs/reproductions/NAME.md."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from experiments.reproductions import NAMES
from experiments.reproductions.common import Reproduced, Reproduction

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def page(chosen: Reproduction, record: Reproduced, source: Path) -> str:
    """The page of a record: the sentence first, then tables, picture, reasons, and how it was measured."""
    meta, verdicts = record.meta, {True: "**agrees**", False: "disagrees", None: "not measured"}
    claims = [[claim.paper, claim.ours, verdicts[claim.holds]] for claim in chosen.claims(record)]
    parts = [
        f"# {chosen.title}", chosen.sentence(record), f"*{chosen.paper}.*",
        f"![{chosen.picture(record)[1]}]({chosen.name}.svg)",
        "## Point by point", table(["it is said that", "here", "verdict"], claims),
    ]  # fmt: skip
    for each in chosen.tables(record):
        parts += [f"## {each.title}", table(each.heads, each.rows)]
    parts += ["## Why they differ", "\n".join(f"- {reason}" for reason in chosen.why(record))]
    load = f"{meta['load_average']} before and {meta['load_average_after']} after"
    parts += [
        "## How to measure it again", f"```\n{command(chosen, meta['command'])}\n```",
        f"Measured on {meta['started'][:10]} in {meta['seconds']:,.0f} s: {meta['hardware']}, {meta['threads']} of "
        f"{meta['cores']} threads, load average {load}; fast-attention {meta['fast_attention']} ({meta['commit']}), "
        f"torch {meta['torch']}, Python {meta['python']}. Record: `{source.relative_to(ROOT)}`"
        + (f", by the command of then, `{shlex.join(meta['command'])}`." if meta["command"][0] != "python" else "."),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def command(chosen: Reproduction, recorded: list[str]) -> str:
    """The command that repeats a record; those of before 28 November 2026 begin with ``fast-attention reproduce``."""
    begins = 3  # behind `python -m MODULE`, or behind `fast-attention reproduce NAME`
    options = [option for option in recorded[begins:] if option not in ("--resume", "--restart")]
    return shlex.join(["python", "-m", f"experiments.reproductions.{chosen.name}", *options])


def overview(records: Iterable[tuple[Reproduction, Reproduced, Path]]) -> str:
    """The closing table: a row for every record."""
    rows = []
    for chosen, record, _ in records:
        claims = chosen.claims(record)
        agree = f"{sum(claim.holds is True for claim in claims)} of {len(claims)}"
        rows.append(
            [f"[{chosen.title}](reproductions/{chosen.name}.md) ({chosen.paper})", agree, chosen.sentence(record)]
        )
    held = table(["reproduction", "points that agree", "what differs"], rows)
    words = (
        "Papers' figures and tables measured here, each by a script of `experiments/reproductions` that runs from a "
        "checkout (`python -m experiments.reproductions.NAME`), on two cores in at most 30 minutes. Published numbers "
        "are theirs, ours are of the newest record, and where they disagree the first line of the page says so. This "
        "page and all others are written by `python docs/build.py`."
    )
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(f"reproductions/{row[0].name}" for row in records), "```"])
    return "\n\n".join(["# Reproductions", words, held, toctree]) + "\n"


def known() -> list[tuple[Reproduction, Reproduced, Path]]:
    """Every reproduction that has a record, with its newest."""
    chosen = [import_module(f"experiments.reproductions.{name}").REPRODUCTION for name in NAMES]
    found = {}
    for path in sorted((ROOT / "records").glob("*-reproduce-*.json"), key=lambda path: path.stem):
        found[path.stem.removesuffix(path.stem[-2:] if path.stem[-2] == "-" else "")[21:]] = path  # a day's second: "-2"
    return [(each, Reproduced.read(found[each.name]), found[each.name]) for each in chosen if each.name in found]


def made() -> dict[Path, str]:
    """The overview, the page and the picture of every record."""
    records, folder = known(), DOCS / "reproductions"
    texts = {DOCS / "reproductions.md": overview(records)}
    for chosen, record, source in records:
        texts[folder / f"{chosen.name}.md"] = page(chosen, record, source)
        texts[folder / f"{chosen.name}.svg"] = chosen.picture(record)[0]
    return texts
