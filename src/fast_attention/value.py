"""A value: a frozen dataclass whose repr is the shortest text that builds it again."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

SEEDS = 1 << 32  # the number of valid seeds

_WORDS = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a text", NoneType: "None"}


class Value:
    """The base class of frozen settings. Subclasses are ``@dataclass(frozen=True, repr=False)``.

    The repr names only the settings that differ from their defaults: ``FavorPlus(num_features=64)``, ``Softmax()``.
    Numbers of other libraries, such as numpy's, become Python's, which a repr can name.
    """

    _expression: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        post_init = vars(cls).get("__post_init__")
        if post_init is None:
            return

        @functools.wraps(post_init)
        def checked(self: Any) -> None:
            plain_numbers(self)
            try:
                post_init(self)
            except (TypeError, AttributeError):
                typed(self)  # what its own checks cannot compare is of a wrong type
                raise
            Value.__post_init__(self)

        cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        plain_numbers(self)
        if not torch.compiler.is_compiling():
            typed(self)
            object.__setattr__(self, "_expression", repr(self))

    @property
    def expression(self) -> str:
        """The repr, computed once, as a frozen value never changes."""
        return self._expression or repr(self)

    def __repr__(self) -> str:
        assert is_dataclass(self)
        settings = []
        for field in fields(self):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            value = getattr(self, field.name)
            if default is MISSING or value != default or type(value) is not type(default):
                settings.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(settings)})"


def plain_numbers(owner: Any) -> None:
    """Replace the numbers among a frozen value's settings by Python's: numpy's have a repr that is no expression.

    Raises:
        ValueError: A setting is a class of values in place of a value.
    """
    if torch.compiler.is_compiling():
        return
    for name, value in vars(owner).items():
        if isinstance(value, type) and issubclass(value, Value):
            kind = value.__name__
            raise ValueError(f"{type(owner).__name__}({name}={kind}): {kind} is a class: write {kind}()")
        if (plain := _plain(value)) is not value:
            object.__setattr__(owner, name, plain)


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        plain = tuple(map(_plain, value))
        return value if all(map(operator.is_, plain, value)) else plain
    if type(value) in (int, float, bool, str, NoneType) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def typed(owner: Any) -> None:
    """Raise a ``ValueError`` where a setting does not have its annotated type, or is NaN or infinite.

    Settings that may be functions are checked only where they are plain values; the owner checks the rest.
    """
    kind = type(owner)
    for name, hint in _annotated(kind):
        value = getattr(owner, name)
        if not _allows(hint, value):
            raise ValueError(f"{kind.__name__}({name}={value!r}): {name} must be {_in_words(hint)}")


@functools.cache
def _annotated(kind: type) -> tuple[tuple[str, Any], ...]:
    """The settings of a class, each with its annotation; none if annotations cannot be resolved."""
    try:
        hints = get_type_hints(kind)
    except (NameError, TypeError):
        return ()
    return tuple((field.name, hints[field.name]) for field in fields(kind) if field.init)  # type: ignore[arg-type]


def _allows(hint: Any, value: Any) -> bool:
    """Whether an annotation allows a value; a function's, which cannot be checked, all but plain values."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(_allows(option, value) for option in get_args(hint))
    if kind is tuple and get_args(hint):
        types = get_args(hint)
        if not isinstance(value, tuple):
            return False
        types = types[:1] * len(value) if types[-1] is ... else types
        return len(types) == len(value) and all(map(_allows, types, value))
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is Any or isinstance(kind, TypeVar):
        return True
    if not isinstance(kind, type) or kind is Callable:
        return not isinstance(value, NoneType | bool | int | float | str | bytes)
    return isinstance(value, kind)


def _in_words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, get_args(hint))))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return _WORDS.get(hint) or (hint.__name__ if isinstance(hint, type) else str(hint))


def at_least(owner: object, setting: str, value: object, least: int | float, *, nothing: object = None) -> None:
    """Raise a ``ValueError`` unless ``value`` is a number, a whole one where ``least`` is, and at least that.

    ``nothing`` is what to write in place of a value of 0.
    """
    kinds, words = ((int,), "whole number") if isinstance(least, int) else ((int, float), "number")
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
        call = f"{type(owner).__name__}({setting}={value!r})"
        instead = f"; without any, that is {nothing}" if nothing is not None and value == 0 else ""
        raise ValueError(f"{call}: {setting} must be at least {least}, a {words}{instead}")


def is_seed(owner: object, setting: str, value: object) -> None:
    """Raise a ``ValueError`` unless every generator takes ``value`` for its seed."""
    at_least(owner, setting, value, 0)
    if isinstance(value, int) and value >= SEEDS:
        raise ValueError(f"{type(owner).__name__}({setting}={value}): a seed is below {SEEDS}")
