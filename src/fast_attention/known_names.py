"""Names that papers and libraries use for attentions, with the expression of ours for each: ``known_names.csv``."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Known(NamedTuple):
    """A name from a paper or a library."""

    name: str  # the usual one, with variants after commas
    write: str  # our expression for it, or the nearest one
    exact: bool  # whether it is the same mathematics
    note: str  # differences or remarks; may be empty

    @property
    def names(self) -> list[str]:
        """The usual name and its variants."""
        return self.name.split(", ")

    def __str__(self) -> str:
        text = f"{self.names[0]}: {self.write}" if self.exact else f"{self.names[0]}: not here; nearest is {self.write}"
        return f"{text} ({self.note})" if self.note else text


def _read() -> Iterator[Known]:
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield Known(row["name"], row["write"], row["exact"] == "yes", row["note"])


KNOWN = (*_read(),)


def simple(name: str) -> str:
    """A name without case, spaces, hyphens and accents."""
    return re.sub(r"[^a-z0-9+']", "", name.lower().replace("ö", "o"))


def forms(name: str) -> tuple[str, ...]:
    """A simple name; without words that say what kind of thing it is, such as "attention"; and in the singular.

    None of a text that is no name, such as a call.
    """
    whole = simple(name)
    return () if re.search(r"[^\w\s+'-]", name) else (whole, _bare(whole), _bare(whole.removesuffix("s")))


def _bare(name: str) -> str:
    kind = "(attention|self|multihead|transformers?|layer|mechanism|distance|model|network)+$"
    return re.sub("^(causal|multihead)(?=.)", "", re.sub(kind, "", name) or name)


_BY_NAME = {simple(name): known for known in KNOWN for name in known.names}


def known(text: str) -> Known | None:
    """The entry for a name (settings in brackets are ignored), or None.

    "Performers", "Performer attention" and "performer" are the Performer.
    """
    return next((_BY_NAME[form] for form in forms(text.split("(")[0]) if form in _BY_NAME), None)
