"""Records which path a call takes, and why; free unless someone asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch


class Step(NamedTuple):
    """One choice: what ran, why it and not something else, and with which sizes."""

    path: str
    why: str
    sizes: dict[str, int]


_trace: ContextVar[list[Step] | None] = ContextVar("dispatch_trace", default=None)


def record(path: str, why: str, **sizes: int) -> None:
    """Record that ``path`` runs now, in the words of someone who never saw the code; sizes such as ``chunk=64``."""
    if torch.compiler.is_compiling():
        return
    steps = _trace.get()
    if steps is not None:
        steps.append(Step(path, why, sizes))


@contextmanager
def recorded() -> Iterator[list[Step]]:
    """Collect the steps of every call inside."""
    steps: list[Step] = []
    token = _trace.set(steps)
    try:
        yield steps
    finally:
        _trace.reset(token)
