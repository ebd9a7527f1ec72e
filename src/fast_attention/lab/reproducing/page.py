"""Shows a reproduction: the sentence that says how it differs, the tables, the page."""

from __future__ import annotations

from fast_attention.lab import pages
from fast_attention.lab.pages import Figure, Listing, Section, Words
from fast_attention.lab.reproducing.reproduction import Reproduced, Reproduction, verdicts
from fast_attention.lab.tables import Table


def tables(reproduction: Reproduction, record: Reproduced) -> list[Table | str]:
    """All tables with the sentence below, for the terminal."""
    shown: list[Table | str] = []
    for each in reproduction.tables(record):
        shown += [each, ""]
    return [*shown, reproduction.sentence(record)]


def html(reproduction: Reproduction, record: Reproduced) -> str:
    """The page."""
    meta = record.meta
    facts = {"What": reproduction.title, "Paper": reproduction.paper, "Minutes": f"{meta['minutes']:g}"}
    if meta["seeds"]:
        facts["Draws or seeds"] = str(meta["seeds"])
    picture = reproduction.drawing(record)
    sections = [
        Section(f"Against {reproduction.source}", [Words(reproduction.sentence(record), "lead")]),
        Section("The picture", [Figure(picture, picture.alt)]),
        Section("Point by point", [verdicts(reproduction.claims(record))]),
        *(Section(each.title, [each]) for each in reproduction.tables(record)),
        Section("Why they differ", [Listing(reproduction.why(record))]),
        pages.run(meta, facts),
        pages.again(meta, record.data),
    ]
    return pages.page(f"reproduce {reproduction.name}", sections, pages.partial(meta, "reproduction"))
