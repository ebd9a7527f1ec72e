"""Write docs/reproductions.md and a page for each reproduction: python docs/reproduction_pages.py.

All is of the newest records, and made anew when the site is built.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from fast_attention import files
from fast_attention.lab.reproducing.listing import REPRODUCTIONS
from fast_attention.lab.reproducing.reproduction import Reproduced, Reproduction, verdicts
from fast_attention.lab.tables import Table, Value

ROOT = Path(__file__).resolve().parent.parent
OVERVIEW, FOLDER = ROOT / "docs" / "reproductions.md", ROOT / "docs" / "reproductions"


def newest(name: str) -> Path | None:
    """The last record of a reproduction."""
    found = sorted((ROOT / "records").glob(f"*-reproduce-{name}.json"))
    found += sorted((ROOT / "records").glob(f"*-reproduce-{name}-[0-9].json"))  # a day's later ones
    return max(found, key=lambda path: (path.name[:10], len(path.name), path.name), default=None)


def table(held: Table) -> str:
    """A table in Markdown: what stands small below a value is in brackets behind it, what is green is bold."""
    rows = [held.heads, ["---"] * len(held.heads)]
    rows += [[_cell(value, at) for at, value in enumerate(values)] for values, _ in held.values]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: Value, at: int) -> str:
    text = value.text.replace("|", "\\|")
    text = f"`{text}`" if at == 0 and re.fullmatch(r"[A-Z]\w*\(.*\)", text) else text
    text = f"**{text}**" if value.kind == "fast" else text
    return f"{text} ({value.small})" if value.small else text


def page(chosen: Reproduction, record: Reproduced, source: Path) -> str:
    """The page of a record: the sentence first, then tables, picture, reasons, and how it was measured."""
    meta = record.meta
    parts = [
        f"# {chosen.title}", chosen.sentence(record), f"*{chosen.paper}.*",
        f"![{chosen.drawing(record).alt}]({chosen.name}.svg)",
        "## Point by point", table(verdicts(chosen.claims(record))),
    ]  # fmt: skip
    for each in chosen.tables(record):
        parts += [f"## {each.title}", table(each)]
    parts += ["## Why they differ", "\n".join(f"- {reason}" for reason in chosen.why(record))]
    load = f"{meta['load_average']} before and {meta['load_average_after']} after"
    parts += [
        "## How it was measured", f"```\n{shlex.join(meta['command'])}\n```",
        f"{meta['hardware']}, {meta['threads']} of {meta['cores']} threads, load average {load}; fast-attention "
        f"{meta['fast_attention']} ({meta['commit']}), torch {meta['torch']}, Python {meta['python']}; "
        f"{meta['started'][:10]}, {meta['seconds']:,.0f} s. Record: `{source.relative_to(ROOT)}`.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def overview(records: Iterable[tuple[Reproduction, Reproduced, Path]]) -> str:
    """The closing table: a row for every record."""
    rows = []
    for chosen, record, _ in records:
        claims = chosen.claims(record)
        agree = f"{sum(claim.holds is True for claim in claims)} of {len(claims)}"
        rows.append(
            [f"[{chosen.title}](reproductions/{chosen.name}.md) ({chosen.paper})", agree, chosen.sentence(record)]
        )
    held = Table(["reproduction", "points that agree", "what differs"], rows)
    words = (
        "Papers' figures and tables measured here, each by `fast-attention reproduce NAME`, on two cores in at most 30 "
        "minutes. Published numbers are theirs, ours are of the newest record, and where they disagree the first line "
        "of the page says so. This page and all others are written by docs/reproduction_pages.py."
    )
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(f"reproductions/{row[0].name}" for row in records), "```"])
    return "\n\n".join(["# Reproductions", words, table(held), toctree]) + "\n"


def known() -> list[tuple[Reproduction, Reproduced, Path]]:
    """Every reproduction that has a record, with its newest."""
    pairs = [(each, newest(each.name)) for each in REPRODUCTIONS.values()]
    return [(each, Reproduced.read(path), path) for each, path in pairs if path is not None]


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
        files.write(FOLDER / f"{chosen.name}.svg", chosen.drawing(record).svg)


if __name__ == "__main__":
    write()
