"""Builds a command's page: sections of words, facts, tables and pictures as one HTML file, which loads nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jinja2

from fast_attention.lab.pictures import DARK, Picture
from fast_attention.lab.records import Record
from fast_attention.lab.tables import Table


class Words(NamedTuple):
    """A paragraph: plain, or of a kind: ``"lead"``, ``"warn"``, ``"code"``."""

    text: str
    kind: str = ""


class Facts(NamedTuple):
    """Names and what they stand for."""

    rows: Mapping[str, object]


class Listing(NamedTuple):
    """Lines; of a pair the first stands as code."""

    lines: Sequence[str | tuple[str, str]]


class Figure(NamedTuple):
    """A picture with its caption; ``"small"`` where it is no wider than a page of text."""

    picture: Picture
    caption: str
    kind: str = ""


class Folded(NamedTuple):
    """A block that opens when it is clicked on."""

    title: str
    block: Table


Block = Words | Facts | Listing | Figure | Folded | Table


class Section(NamedTuple):
    """Blocks under a heading; one without blocks is left out."""

    title: str
    blocks: Sequence[Block]


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("fast_attention.lab", "templates"), autoescape=True, trim_blocks=True,
    lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
)  # fmt: skip


def page(command: str, sections: Iterable[Section], warnings: Iterable[Words] = ()) -> str:
    """The page of a command; all that is not a picture of ours is escaped."""
    shown = [section for section in sections if section.blocks]
    template = _TEMPLATES.get_template("page.html")
    return template.render(command=command, warnings=list(warnings), sections=shown, dark=DARK)


def page_of(
    record: Record, sections: Iterable[Section], facts: Mapping[str, object], what: str,
    opening: Iterable[Words] = (), more: str = "",
) -> str:  # fmt: skip
    """The page of a record: what it says, how it was measured, and how to reproduce it.

    Args:
        record: The command's record.
        sections: What it says.
        facts: About the run, before the machine, the versions and the time of every record.
        what: What was measured, in one line.
        opening: Stands above all.
        more: What else lies beside the page.
    """
    meta = record.meta
    is_complete, after = meta["status"] == "complete", meta.get("load_average_after")
    partial = [] if is_complete else [Words(f"This {record.noun} was {meta['status']}: it is partial.", "warn")]
    where = Words(f"{what}; {meta['hardware']}, {meta['threads']} of {meta['cores']} threads.")
    before, end = (", ".join(map(str, loads or ["unknown"])) for loads in (meta["load_average"], after))
    load = f"load average {before} " + ("at the start" if after is None else f"before and {end} after")
    models = f"transformers {meta['transformers'] or 'not used'}, " if "transformers" in meta else ""
    spent = f", {meta['seconds']:,.0f} s" if "seconds" in meta else ""
    seed = f", seed {meta['seed']}" if "seed" in meta else ""
    shared = {
        "Machine": f"{meta['hardware']}, {meta['device']}, {meta['threads']} of {meta['cores']} threads, {load}"
        + (f"; freed memory (keep_memory): {meta['freed_memory']}" if "freed_memory" in meta else ""),
        "Versions": f"fast-attention {meta['fast_attention']} ({meta['commit'] or 'no commit known'}), "
        f"torch {meta['torch']}, {models}Python {meta['python']}, {meta['platform']}",
        "When": f"{meta['started']} to {meta.get('finished', 'unfinished')}{spent}{seed}",
    }
    again = f"{more} All numbers: {record.data} beside this page.".strip()
    about = [
        Section("What was run", [Facts({**facts, **shared})]),
        Section("How to reproduce", [Words(shlex.join(meta["command"]), "code"), Words(again)]),
    ]
    return page(record.kind, [*sections, *about], [*opening, *partial, where])
