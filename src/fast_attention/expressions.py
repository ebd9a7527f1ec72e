"""Parses expressions: names and calls with plain settings, the inverse of ``Value``'s repr. Nothing is executed."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

LONGEST = 10_000  # characters of a text that is read


@dataclass(frozen=True)
class Parser:
    """A parser for the values of one kind.

    Args:
        kind: Their name in errors, such as ``"mechanism"``.
        example: A call as a user would write it, for errors.
        values: Every class that may occur in a text, by name: those of the kind, and those of its settings.
        names: The names of the kind's classes alone.
        others: More classes by name, asked for where none of these is meant.
    """

    kind: str
    example: str
    values: dict[str, type]
    names: tuple[str, ...]
    others: Callable[[], dict[str, type]] = dict

    def read(self, text: str) -> Any:
        """Parse a name (``"Local"``) or a call (``"Local(window=64)"``).

        Raises:
            ValueError: The text is no call with plain values, or names no class or no such setting.
        """
        if len(text) > LONGEST:
            raise ValueError(f"{text[:40]!r}... has {len(text):,} characters: no {self.kind} is written in so many")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            message = f"{text!r} is not a {self.kind}: write a name, or a call such as {self.example}"
            raise ValueError(message) from error
        return self._build(tree, text)

    def nearest(self, name: str, among: tuple[str, ...] | None = None) -> str:
        """A sentence with the names that look most like ``name``, or with all of them."""
        lowered = {key.lower(): key for key in among or self.names}
        close = difflib.get_close_matches(name.split("(")[0].lower(), lowered, n=3, cutoff=0.5)
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
                return self._make(name, [], {}, text)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if all(word.arg for word in keywords):
                settings = {str(word.arg): self._build(word.value, text) for word in keywords}
                return self._make(name, [self._build(arg, text) for arg in args], settings, text)
            case _:
                raise ValueError(f"{text!r}: settings are numbers, strings, True, False, None, tuples and named values")

    def _make(self, name: str, args: list[Any], settings: dict[str, Any], text: str) -> Any:
        kind = self.values.get(name) or self.others().get(name)
        if kind is None:
            near = self.nearest(name, tuple(self.values))
            near += (
                "" if self.others is dict else " A class of yours must be imported first (commands: --import MODULE)."
            )
            raise ValueError(f"{text!r}: no {self.kind} or value is called {name!r}.{near}")
        known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
        for setting in settings:
            if setting not in known:
                listed = ", ".join(known) or "none"
                raise ValueError(f"{text!r}: {name} has no setting {setting!r}; its settings are: {listed}")
        if len(args) > len(known):
            raise ValueError(f"{text!r}: {name} has {len(known)} settings and got {len(args)} values")
        try:
            return kind(*args, **settings)
        except TypeError as error:
            raise ValueError(f"{text!r}: {error}") from error


__all__ = ["Parser"]
