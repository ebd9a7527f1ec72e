"""Decides between what a model ran before and a form of ours, which a block can force for checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_forced: ContextVar[bool | None] = ContextVar("forced", default=None)
_calls: ContextVar[list[Any] | None] = ContextVar("calls", default=None)


def runs(pays: bool) -> bool:
    """Whether a form of ours runs where it ``pays``; code that ``torch.compile`` traces must not ask."""
    forced = _forced.get()
    return pays if forced is None else forced


@contextmanager
def original() -> Iterator[None]:
    """Run everything in the block as before the swap."""
    with _set(False):
        yield


@contextmanager
def forced() -> Iterator[None]:
    """Run our forms in the block at any length."""
    with _set(True):
        yield


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Record all attention calls in the block instead of computing them: their outputs are zeros."""
    recorded_calls: list[Any] = []
    token = _calls.set(recorded_calls)
    try:
        yield recorded_calls
    finally:
        _calls.reset(token)


def recording() -> list[Any] | None:
    """The list that calls are recorded in; None outside of ``recorded``."""
    return _calls.get()


@contextmanager
def _set(value: bool) -> Iterator[None]:
    token = _forced.set(value)
    try:
        yield
    finally:
        _forced.reset(token)
