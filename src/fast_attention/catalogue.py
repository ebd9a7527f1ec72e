"""The catalogue of mechanisms by name, and ``parse``, the inverse of ``repr``; names that the field uses for them."""

from __future__ import annotations

import csv
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fast_attention import mechanisms
from fast_attention.expressions import LONGEST, Parser, quoted
from fast_attention.feature_maps import features
from fast_attention.mechanism import Attention, Mechanism, Mixer
from fast_attention.mechanisms.dense import projections
from fast_attention.value import Value


def _public(module: Any, kind: type) -> dict[str, type]:
    classes = {name: value for name, value in vars(module).items() if inspect.isclass(value) and name[0] != "_"}
    found = {name: value for name, value in classes.items() if issubclass(value, kind) and value is not Value}
    return {name: value for name, value in found.items() if not inspect.isabstract(value)}


def _of_users() -> dict[str, type]:
    """Mechanisms, feature maps and other values that users' imported modules define, the newest of a name."""
    kinds = list(Value.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.__name__: kind for kind in kinds if not kind.__module__.startswith("fast_attention.")}


_MECHANISMS: dict[str, type[Mechanism[Any, Any]]] = _public(mechanisms, Mechanism)
_PARSER = Parser(
    "mechanism",
    "Softmax(scale=1.0)",
    Mechanism,
    {**_public(mechanisms, Value), **_public(features, Value), **_public(projections, Value)},
    tuple(_MECHANISMS),
    _of_users,
)


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
    with Path(__file__).with_name("known_names.csv").open(encoding="utf-8", newline="") as file:
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


def names() -> list[str]:
    """The names of all mechanisms, in the order of the contents page."""
    return list(_MECHANISMS)


def default(name: str) -> Attention[Any, Any] | Mixer[Any, Any]:
    """The mechanism called ``name`` with its default settings.

    Raises:
        ValueError: No mechanism has that name; the nearest ones are named.
    """
    if not isinstance(name, str):
        raise TypeError(_PARSER.instead(name))
    if name not in _MECHANISMS:
        raise ValueError(elsewhere(name) or f"no mechanism is called {quoted(name)}.{_PARSER.nearest(name)}")
    mechanism = _MECHANISMS[name]()
    assert isinstance(mechanism, Attention | Mixer)
    return mechanism


def elsewhere(text: str) -> str:
    """A message that says what to write for a name that papers or libraries use; empty for an unknown name."""
    text = text[:LONGEST]
    # No match begins inside a word or gives up a part of one, or the time would grow with the square of the length.
    head, inner = text.split("(")[0].strip(), re.findall(r"(?<![\w+-])([\w+-]++)\s*+\(", text)
    for name in dict.fromkeys((head, *inner)):
        if name not in _PARSER.values and (entry := known(name)):
            return f"{quoted(name)} is not a name of ours. {entry}. Write {entry.write}."
        if name not in _PARSER.values and (ours := own_name(name)):
            return f"{quoted(name)} is spelt {ours}() here."
    return ""


def own_name(text: str) -> str:
    """The name of ours that a name means in other letters: ``"linear self-attention"``, ``"gMLP"``; empty for none."""
    for form in forms(text):
        for name in names():
            if form in forms(name)[:2]:
                return name
    return ""


def parse(text: str | Mechanism[Any, Any]) -> Attention[Any, Any] | Mixer[Any, Any]:
    """Parse a mechanism: a name (``"Local"``) or a repr (``"Local(window=64)"``), in which classes of users' modules
    may stand that are imported. Nothing is executed.

    Raises:
        ValueError: The text names no mechanism or no such setting, or is not a call with plain values. A name that
            the field uses for a mechanism (``"Performer"``) is answered with ours.
        TypeError: It is neither a mechanism nor a text, such as a class: ``Local`` in place of ``Local()``.
    """
    if isinstance(text, Attention | Mixer):
        return text
    if not isinstance(text, str):
        raise TypeError(_PARSER.instead(text))
    try:
        value = _PARSER.read(text)
    except ValueError as error:
        raise ValueError(elsewhere(text) or str(error)) from error
    assert isinstance(value, Attention | Mixer)
    return value


def readable(mechanism: Mechanism[Any, Any]) -> bool:
    """Whether a mechanism's repr gives it back: not with a function in it, or a class of the user's named like ours."""
    try:
        return parse(repr(mechanism)) == mechanism
    except ValueError:
        return False


__all__ = [
    "default", "elsewhere", "names", "own_name", "parse", "readable",
]  # fmt: skip
