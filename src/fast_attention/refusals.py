"""Finds what a refusal may name: the mechanisms that grant what another denies, those most like it first.

Also refuses what is no module, where a model is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fast_attention.expressions import in_words


def granting(kind: type[Any], trait: str, like: Any, needed: str | None = None) -> list[str]:
    """Names of the loaded mechanisms of a kind whose default value grants a trait, those most ``like`` another first.

    Where some cost no more than that one as sequences grow, only these. Its own family comes before others; in a family
    those come first that have most traits in common with it. What is granted is any value of the trait that is true, or
    only the one that is ``needed``.
    """
    known = {one: one().traits for one in loaded(kind)}
    values = {one: getattr(traits, trait) for one, traits in known.items()}
    granted = [one for one, value in values.items() if (value == needed if needed else value)]
    granted = [one for one in granted if known[one].complexity_exponent <= like.traits.complexity_exponent] or granted
    family = type(like).__module__.rpartition(".")[0]

    def unlike(one: type[Any]) -> tuple[bool, int]:
        return one.__module__.rpartition(".")[0] != family, -like.traits.shared(known[one])

    return [one.__name__ for one in sorted(granted, key=unlike)]


def loaded(kind: type[Any]) -> Iterator[type[Any]]:
    """The mechanisms of a kind, in the order they were defined."""
    for subclass in [x for x in kind.__subclasses__() if x.__module__.startswith("fast_attention.")]:
        yield from loaded(subclass)
        if not getattr(subclass, "__abstractmethods__", None):
            yield subclass


def is_module(name: str, value: object) -> None:
    """Raise a ``TypeError`` unless ``value`` is an ``nn.Module``: a name, a class or a function is none yet."""
    if isinstance(value, nn.Module):
        return
    if isinstance(value, str):
        instead = ": load it first, as in AutoModel.from_pretrained(...)"
    else:
        instead = "" if isinstance(value, type) else ": give the nn.Module that holds its attention"
    raise TypeError(f"{name} must be an nn.Module; got {in_words(value)}{instead}")
