"""Decides whether a hand-written fast path may run, records which path a call takes, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from fast_attention.engine.tracing import symbolic, traced, wrapped


class Step(NamedTuple):
    """One choice: what ran, why it and not something else, and with which sizes."""

    path: str
    why: str
    sizes: dict[str, int]


_trace: ContextVar[list[Step] | None] = ContextVar("dispatch_trace", default=None)


def obstacle(*tensors: Tensor, even: bool = False, anywhere: bool = False) -> str:
    """Why no hand-written path may run on these tensors, which share a device; empty where one may.

    Families ask it before what only they know, a length say: while tracing, a size may be a symbol that must not be
    compared. An ``opaque`` operation asks inside, where it runs on numbers.

    Args:
        tensors: What the path reads; at least one.
        even: Whether the path takes tensors of one dtype and equal leading sizes (all but the last two) only.
        anywhere: Whether the path serves every device.
    """
    if traced():
        return "traced"
    first = tensors[0]
    if not anywhere and not served(first):
        return "not on a CPU"
    for x in tensors:
        if type(x) is not Tensor and wrapped((x,)):
            return "a tensor that overrides operations"
        if x.numel() == 0:
            return "no tokens"
    return _uneven(tensors) if even else ""


def _uneven(tensors: tuple[Tensor, ...]) -> str:
    shape, dtype = tensors[0].shape, tensors[0].dtype
    for x in tensors[1:]:
        if x.dtype != dtype:
            return "dtypes that differ"
        if (other := x.shape) != shape and other[:-2] != shape[:-2]:
            return "leading sizes that differ"
    return ""


def served(x: Tensor) -> bool:
    """Whether fast paths are written for the device of ``x``: the line that a GPU's would change."""
    return x.is_cpu


def record(path: str, why: str, **sizes: int) -> None:
    """Record that ``path`` runs now, in the words of someone who never saw the code; sizes such as ``chunk=64``.

    Free unless someone asks.
    """
    if symbolic():
        return
    steps = _trace.get()
    if steps is not None:
        steps.append(Step(path, why, sizes))


def asked() -> bool:
    """Whether someone collects steps."""
    return _trace.get() is not None


@contextmanager
def recorded() -> Iterator[list[Step]]:
    """Collect the steps of every call inside."""
    steps: list[Step] = []
    token = _trace.set(steps)
    try:
        yield steps
    finally:
        _trace.reset(token)
