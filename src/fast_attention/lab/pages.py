"""Builds a command's page: sections of words, facts, tables and pictures as one HTML file, which loads nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jinja2

from fast_attention.lab.pictures import DARK, Picture
from fast_attention.lab.tables import Table


class Words(NamedTuple):
    """A paragraph: plain, or of a kind: ``"lead"``, ``"warn"``."""

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


class Code(NamedTuple):
    """A command line."""

    text: str


class Folded(NamedTuple):
    """A block that opens when it is clicked on."""

    title: str
    block: Table


Block = Words | Facts | Listing | Figure | Code | Folded | Table


class Section(NamedTuple):
    """Blocks under a heading; one without blocks is left out."""

    title: str
    blocks: Sequence[Block]


def page(command: str, sections: Iterable[Section], warnings: Iterable[Words] = ()) -> str:
    """The page of a command; all that is not a picture of ours is escaped."""
    shown = [section for section in sections if section.blocks]
    return _template().render(command=command, warnings=list(warnings), sections=shown, dark=DARK)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fast_attention.lab", "templates"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("page.html")


def partial(meta: Mapping[str, Any], noun: str) -> list[Words]:
    """A warning, unless the command came to its end."""
    status = meta["status"]
    return [] if status == "complete" else [Words(f"This {noun} was {status}: it is partial.", "warn")]


def where(meta: Mapping[str, Any], what: str) -> Words:
    """One line about what was measured, and on which machine."""
    return Words(f"{what}; {meta['hardware']}, {meta['threads']} of {meta['cores']} threads.")


def run(meta: Mapping[str, Any], facts: Mapping[str, object]) -> Section:
    """Facts about a run: the command's own, and the machine, versions and time of every record."""
    after = meta.get("load_average_after")
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
    return Section("What was run", [Facts({**facts, **shared})])


def again(meta: Mapping[str, Any], record: str, more: str = "") -> Section:
    """How to reproduce a run, and where its numbers are."""
    words = f"{more} All numbers: {record} beside this page.".strip()
    return Section("How to reproduce", [Code(shlex.join(meta["command"])), Words(words)])
