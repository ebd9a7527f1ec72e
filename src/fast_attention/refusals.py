"""Finds what a refusal may name: the mechanisms that grant what another denies, those most like it first.

Also refuses what is no module, where a model is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fast_attention.expressions import in_words
from fast_attention.traits import Traits


def granting(kind: type[Any], trait: str, like: Traits, needed: str | None = None) -> list[str]:
    """Names of the loaded mechanisms of a kind whose default value grants a trait, those most ``like`` others first.

    What is granted is any value of the trait that is true, or only the one that is ``needed``.
    """
    known = {one.__name__: one().traits for one in _loaded(kind)}
    values = {name: getattr(traits, trait) for name, traits in known.items()}
    granted = (name for name, value in values.items() if (value == needed if needed else value))
    return sorted(granted, key=lambda name: -like.shared(known[name]))


def _loaded(kind: type[Any]) -> Iterator[type[Any]]:
    """The mechanisms of a kind, in the order they were defined."""
    for subclass in [x for x in kind.__subclasses__() if x.__module__.startswith("fast_attention.")]:
        yield from _loaded(subclass)
        if not getattr(subclass, "__abstractmethods__", None):
            yield subclass


def is_module(name: str, value: object) -> None:
    """Raise a ``TypeError`` unless ``value`` is an ``nn.Module``: a name, a class or a function is none yet."""
    if isinstance(value, nn.Module):
        return
    if isinstance(value, str):
        instead = "load it first, as in AutoModel.from_pretrained(...)"
    elif isinstance(value, type) and issubclass(value, nn.Module):
        instead = "build it first"
    else:
        instead = "give the nn.Module that it runs"
    raise TypeError(f"{name} must be an nn.Module; got {in_words(value)}: {instead}")
