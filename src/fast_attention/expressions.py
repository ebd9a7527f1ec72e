"""Parses expressions: names and calls with plain settings, the inverse of ``Value``'s repr. Nothing is executed."""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

LONGEST = 10_000  # characters of a text that is read
QUOTED = 80  # characters of it that an error repeats


def quoted(text: str) -> str:
    """The text in quotes, cut off where it is long."""
    return repr(text) if len(text) <= 2 * QUOTED else f"{text[:QUOTED]!r}... ({len(text):,} characters)"


@dataclass(frozen=True)
class Parser:
    """A parser for the values of one kind."""

    kind: str  # in errors, such as "mechanism"
    example: str  # a call as a user would write it, for errors
    base: type  # the class of which every value of the kind is an instance
    values: dict[str, type]  # every class that may occur in a text, by name: of the kind, and of its settings
    names: tuple[str, ...]  # of the kind's classes alone
    others: Callable[[], dict[str, type]] = dict  # more classes by name, asked for where none of these is meant

    def read(self, text: str) -> Any:
        """Parse a name (``"Local"``) or a call (``"Local(window=64)"``).

        Raises:
            ValueError: The text is no call with plain values, or names no class of the kind, or no such setting.
            TypeError: It is no text.
        """
        if not isinstance(text, str):
            raise TypeError(self.instead(text))
        if len(text) > LONGEST:
            raise ValueError(f"{quoted(text)}: no {self.kind} is written in so many")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            message = f"{quoted(text)} is not a {self.kind}: write a name, or a call such as {self.example}"
            raise ValueError(message) from error
        value = self._build(tree, quoted(text))
        if not isinstance(value, self.base):
            raise ValueError(f"{quoted(text)} is not a {self.kind}{self._setting(value) or '.' + self.nearest(text)}")
        return value

    def instead(self, given: object) -> str:
        """Say why something is neither a value of the kind nor a text, and what to write."""
        if isinstance(given, type) and issubclass(given, self.base) and not inspect.isabstract(given):
            return f"{given.__name__} is a class: write {given.__name__}()"
        if setting := self._setting(given):
            return f"{given!r} is not a {self.kind}{setting}"
        return f"a {self.kind} is a value or a text, such as {self.example}; got {in_words(given)}"

    def _setting(self, value: object) -> str:
        """Find where a value that is a setting of the kind is written; empty for anything else."""
        for kind in self.values.values() if is_dataclass(value) and not isinstance(value, type) else ():
            for field in fields(kind) if issubclass(kind, self.base) and is_dataclass(kind) else ():
                with suppress(ValueError, TypeError):
                    return f": it is a setting, as in {kind(**{field.name: value})!r}"
        return ""

    def nearest(self, name: str, among: tuple[str, ...] | None = None) -> str:
        """A sentence with the names that look most like ``name``, or with all of them."""
        lowered = {key.lower(): key for key in among or self.names}
        close = difflib.get_close_matches(name.split("(")[0].lower()[:QUOTED], lowered, n=3, cutoff=0.5)
        if close:
            return f" Did you mean {' or '.join(lowered[key] for key in close)}?"
        return f" There are: {', '.join(self.names)}."

    def _build(self, node: ast.expr, text: str) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return tuple(self._build(element, text) for element in elements)
            case ast.Name(id=name):
                return self._make(name, [], [], text)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if all(word.arg for word in keywords):
                settings = [(str(word.arg), self._build(word.value, text)) for word in keywords]
                return self._make(name, [self._build(arg, text) for arg in args], settings, text)
            case _:
                raise ValueError(f"{text}: settings are numbers, strings, True, False, None, tuples and named values")

    def _make(self, name: str, args: list[Any], settings: list[tuple[str, Any]], text: str) -> Any:
        kind = self.values.get(name) or self.others().get(name)
        if kind is None or not is_dataclass(kind) or inspect.isabstract(kind):
            near = self.nearest(name, (*self.values, *self.names))
            if self.others is not dict:
                near += " A class of yours must be imported first (commands: --import MODULE)."
            raise ValueError(f"{text}: no {self.kind} or value is called {name!r}.{near}")
        known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
        if len(args) > len(known):
            raise ValueError(f"{text}: {name} has {len(known)} settings and got {len(args)} values")
        given = dict(zip(known, args, strict=False))
        for setting, value in settings:
            if setting not in known:
                listed = ", ".join(known) or "none"
                raise ValueError(f"{text}: {name} has no setting {setting!r}; its settings are: {listed}")
            if setting in given:
                raise ValueError(f"{text}: {name} has {setting} twice, {given[setting]!r} and {value!r}: leave one out")
            given[setting] = value
        try:
            return kind(**given)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{text}: {error}") from error


def in_words(value: object) -> str:
    """Name an argument of the wrong type for an error: a class, a function by name, or the type of the value."""
    if isinstance(value, type):
        return f"the class {value.__name__}: write {value.__name__}(...)"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    if inspect.ismodule(value):
        return f"the module {value.__name__}"
    shown = textwrap.shorten(repr(value), QUOTED, placeholder=" ...")
    return f"{shown}, of type {type(value).__name__}"
