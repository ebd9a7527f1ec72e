"""A value: a frozen dataclass whose repr is the shortest text that builds it again."""

from __future__ import annotations

import functools
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, ClassVar, get_args

import torch

SEEDS = 1 << 32  # how many there are


class Value:
    """Base of every setting object. Subclasses are ``@dataclass(frozen=True, repr=False)``.

    The repr names only the settings that differ from their defaults: ``FavorPlus(num_features=64)``, ``Softmax()``.
    """

    _spelled: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).get("__post_init__")
        if own is None:
            return

        @functools.wraps(own)
        def checked(self: Any) -> None:
            own(self)
            Value.__post_init__(self)

        cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():
            object.__setattr__(self, "_spelled", repr(self))

    @property
    def spelling(self) -> str:
        """The repr, made once: a frozen value never changes."""
        return self._spelled or repr(self)

    def __repr__(self) -> str:
        assert is_dataclass(self)
        said = []
        for field in fields(self):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            value = getattr(self, field.name)
            if default is MISSING or value != default or type(value) is not type(default):
                said.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(said)})"


def one_of(owner: object, setting: str, value: object, choices: object) -> None:
    """Raise a ``ValueError`` naming the choices unless ``value`` is among them (a ``Literal`` or a tuple)."""
    options = choices if isinstance(choices, tuple) else get_args(choices)
    if value not in options:
        listed = ", ".join(repr(option) for option in options)
        raise ValueError(f"{type(owner).__name__}({setting}={value!r}): {setting} must be one of {listed}")


def at_least(owner: object, setting: str, value: object, least: int | float) -> None:
    """Raise a ``ValueError`` unless ``value`` is a number, a whole one where ``least`` is, and at least that."""
    kinds, words = ((int,), "whole number") if isinstance(least, int) else ((int, float), "number")
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
        said = f"{type(owner).__name__}({setting}={value!r})"
        raise ValueError(f"{said}: {setting} must be at least {least}, a {words}")


def is_seed(owner: object, setting: str, value: object) -> None:
    """Raise a ``ValueError`` unless every generator takes ``value`` for its seed."""
    at_least(owner, setting, value, 0)
    if isinstance(value, int) and value >= SEEDS:
        raise ValueError(f"{type(owner).__name__}({setting}={value}): a seed is below {SEEDS}")


__all__ = ["SEEDS", "Value", "at_least", "is_seed", "one_of"]
