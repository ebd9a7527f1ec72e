"""Finds what a refusal may name: the mechanisms that grant what another denies, those most like it first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fast_attention.traits import Traits


def granting(kind: type[Any], trait: str, like: Traits) -> list[str]:
    """Names of the loaded mechanisms of a kind whose default value grants a trait, those most ``like`` others first."""
    granted = {one.__name__: one().traits for one in _loaded(kind)}
    return sorted((x for x in granted if getattr(granted[x], trait)), key=lambda x: -like.shared(granted[x]))


def _loaded(kind: type[Any]) -> Iterator[type[Any]]:
    """The mechanisms of a kind, in the order they were defined."""
    for subclass in [x for x in kind.__subclasses__() if x.__module__.startswith("fast_attention.")]:
        yield from _loaded(subclass)
        if not getattr(subclass, "__abstractmethods__", None):
            yield subclass
