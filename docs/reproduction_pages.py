"""Write docs/reproductions.md and a page for each reproduction: python docs/reproduction_pages.py.

All is of the newest records, and made anew when the site is built.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fast_attention import files

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the scripts of experiments/ are of the checkout, not of the package
if TYPE_CHECKING:
    from experiments.reproductions.common import Reproduced, Reproduction
OVERVIEW, FOLDER = ROOT / "docs" / "reproductions.md", ROOT / "docs" / "reproductions"


def scripts() -> list[Reproduction]:
    """The reproductions, in the order of the overview."""
    names = import_module("experiments.reproductions").NAMES
    return [import_module(f"experiments.reproductions.{name}").REPRODUCTION for name in names]


def newest(name: str) -> Path | None:
    """The last record of a reproduction."""
    found = sorted((ROOT / "records").glob(f"*-reproduce-{name}.json"))
    found += sorted((ROOT / "records").glob(f"*-reproduce-{name}-[0-9].json"))  # a day's later ones
    return max(found, key=lambda path: (path.name[:10], len(path.name), path.name), default=None)


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
        "page and all others are written by docs/reproduction_pages.py."
    )
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(f"reproductions/{row[0].name}" for row in records), "```"])
    return "\n\n".join(["# Reproductions", words, held, toctree]) + "\n"


def known() -> list[tuple[Reproduction, Reproduced, Path]]:
    """Every reproduction that has a record, with its newest."""
    read = import_module("experiments.reproductions.common").Reproduced.read
    pairs = [(each, newest(each.name)) for each in scripts()]
    return [(each, read(path), path) for each, path in pairs if path is not None]


def pages() -> dict[Path, str]:
    """The overview and the page of every record."""
    records = known()
    each = {FOLDER / f"{chosen.name}.md": page(chosen, record, source) for chosen, record, source in records}
    return {OVERVIEW: overview(records), **each}


def stale() -> list[str]:
    """The pages that say something else than the records, or of no record."""
    made = pages()
    held = {path: path.read_text(encoding="utf-8") for path in (OVERVIEW, *FOLDER.glob("*.md")) if path.exists()}
    return sorted(path.name for path in made.keys() | held.keys() if made.get(path) != held.get(path))


def write() -> None:
    """Write the overview, and the page and picture of every record."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        files.write(path, text)
    for chosen, record, _ in known():
        files.write(FOLDER / f"{chosen.name}.svg", chosen.picture(record)[0])


if __name__ == "__main__":
    write()
