"""Every mechanism by name, and ``parse``, the inverse of ``repr``."""

from __future__ import annotations

import ast
import difflib
import inspect
from dataclasses import fields
from typing import Any

from fast_attention import mechanisms
from fast_attention.mechanism import Attention, Mechanism, Mixer
from fast_attention.ops.maps import features
from fast_attention.ops.value import Value


def _public(module: Any, kind: type) -> dict[str, type]:
    found = {}
    for name, value in vars(module).items():
        if inspect.isclass(value) and issubclass(value, kind) and not inspect.isabstract(value) and name[0] != "_":
            found[name] = value
    return found


_MECHANISMS: dict[str, type[Mechanism[Any, Any]]] = _public(mechanisms, Mechanism)
_VALUES: dict[str, type] = {**_public(mechanisms, Value), **_public(features, Value)}


def names() -> list[str]:
    """The names of all mechanisms, in the order of the contents page."""
    return list(_MECHANISMS)


def default(name: str) -> Attention[Any, Any] | Mixer[Any, Any]:
    """The mechanism called ``name`` with its default settings.

    Raises:
        ValueError: No mechanism has that name; the nearest ones are named.
    """
    if name not in _MECHANISMS:
        raise ValueError(f"no mechanism is called {name!r}.{_nearest(name, _MECHANISMS)}")
    mechanism = _MECHANISMS[name]()
    assert isinstance(mechanism, Attention | Mixer)
    return mechanism


def parse(text: str | Mechanism[Any, Any]) -> Attention[Any, Any] | Mixer[Any, Any]:
    """The mechanism that ``text`` spells: a name (``"Local"``) or a repr (``"Local(left=64)"``). Nothing is executed.

    Raises:
        ValueError: The text names no mechanism or no such setting, or is not a call with plain values.
    """
    if isinstance(text, Attention | Mixer):
        return text
    try:
        tree = ast.parse(str(text).strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a mechanism: write a name, or a call such as Softmax(scale=1.0)") from error
    value = _build(tree, str(text))
    if not isinstance(value, Attention | Mixer):
        raise ValueError(f"{text!r} is not a mechanism.{_nearest(str(text), _MECHANISMS)}")
    return value


def _build(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_build(part, text) for part in parts)
        case ast.Name(id=name):
            return _make(name, [], {}, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if all(word.arg for word in keywords):
            settings = {str(word.arg): _build(word.value, text) for word in keywords}
            return _make(name, [_build(arg, text) for arg in args], settings, text)
        case _:
            raise ValueError(f"{text!r}: settings are numbers, strings, True, False, None, tuples and named values")


def _make(name: str, args: list[Any], settings: dict[str, Any], text: str) -> Any:
    if name not in _VALUES:
        raise ValueError(f"{text!r}: no mechanism or value is called {name!r}.{_nearest(name, _VALUES)}")
    known = [field.name for field in fields(_VALUES[name]) if field.init]  # type: ignore[arg-type]
    for setting in settings:
        if setting not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"{text!r}: {name} has no setting {setting!r}; its settings are: {listed}")
    if len(args) > len(known):
        raise ValueError(f"{text!r}: {name} has {len(known)} settings and got {len(args)} values")
    try:
        return _VALUES[name](*args, **settings)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}") from error


def _nearest(name: str, among: dict[str, Any]) -> str:
    lowered = {key.lower(): key for key in among}
    close = difflib.get_close_matches(name.split("(")[0].lower(), lowered, n=3, cutoff=0.5)
    if close:
        return f" Did you mean {' or '.join(lowered[key] for key in close)}?"
    return f" There are: {', '.join(_MECHANISMS)}."
