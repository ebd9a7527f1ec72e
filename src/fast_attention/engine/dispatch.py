"""Which path a call took: every choice of an implementation leaves a step; free unless someone follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch


class Step(NamedTuple):
    """One choice: what ran, why it and not something else, and with which sizes."""

    what: str
    why: str
    sizes: dict[str, int]


_trail: ContextVar[list[Step] | None] = ContextVar("trail", default=None)


def took(what: str, why: str, **sizes: int) -> None:
    """Say that ``what`` runs now. In the words of someone who never saw the code; sizes such as ``chunk=64``."""
    if torch.compiler.is_compiling():
        return
    steps = _trail.get()
    if steps is not None:
        steps.append(Step(what, why, sizes))


@contextmanager
def followed() -> Iterator[list[Step]]:
    """Collect the steps of every call inside."""
    steps: list[Step] = []
    token = _trail.set(steps)
    try:
        yield steps
    finally:
        _trail.reset(token)
