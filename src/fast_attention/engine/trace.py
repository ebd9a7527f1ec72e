"""Trace of a call: the implementation that was asked for, what ran and why, which ``explain`` reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, get_args

from fast_attention import core
from fast_attention.engine.tracing import symbolic

Implementation = Literal["auto", "reference", "core", "triton"]
KERNEL, CORE = "Triton kernel", "compiled core"  # how the names of their paths begin


class Step(NamedTuple):
    """One choice: what ran, why it and not something else, and with which sizes."""

    path: str
    why: str
    sizes: dict[str, int]


_steps: ContextVar[list[Step] | None] = ContextVar("steps", default=None)
_wanted: ContextVar[Implementation] = ContextVar("implementation", default="auto")


def wanted() -> Implementation:
    """The implementation that was asked for."""
    return _wanted.get()


def record(path: str, why: str, **sizes: int) -> None:
    """Record that ``path`` runs now, in the words of someone who never saw the code; sizes such as ``chunk=64``.

    Free unless someone asks.
    """
    if not symbolic() and (steps := _steps.get()) is not None:
        steps.append(Step(path, why, sizes))


def asked() -> bool:
    """Whether someone collects steps."""
    return _steps.get() is not None


def collected() -> list[Step] | None:
    """The steps so far, for whoever takes back those of a path that gave up; None where nobody collects any."""
    return _steps.get()


@contextmanager
def recorded() -> Iterator[list[Step]]:
    """Collect the steps of every call inside."""
    steps: list[Step] = []
    token = _steps.set(steps)
    try:
        yield steps
    finally:
        _steps.reset(token)


@contextmanager
def implementation(name: Implementation) -> Iterator[None]:
    """Choose what eager calls inside run: ``"auto"``, ``"reference"``, ``"core"`` or ``"triton"``.

    ``"auto"`` is the fastest that can, ``"reference"`` plain operations, ``"core"`` the compiled core for CPUs and
    ``"triton"`` a kernel for GPUs.

    Raises:
        ValueError: No such implementation.
        NotImplementedError: With ``"core"`` or ``"triton"``, at the end: it did not run; the message says why.
    """
    if name not in get_args(Implementation):
        raise ValueError(f"impl={name!r}: choose one of {', '.join(get_args(Implementation))}")
    token = _wanted.set(name)
    try:
        with recorded() as steps:
            yield
    finally:
        _wanted.reset(token)
    for step in steps:
        record(step.path, step.why, **step.sizes)
    if name == "core" and not any(step.path.startswith(CORE) for step in steps):
        raise NotImplementedError(
            f"impl='core' was asked for and the compiled core did not run ({core.unavailable() or _reasons(steps)}); "
            "impl='auto' runs the fastest that can"
        )
    if name == "triton" and not any(step.path.startswith(KERNEL) for step in steps):
        raise NotImplementedError(
            f"impl='triton' was asked for and no Triton kernel ran ({_reasons(steps)}); "
            "impl='auto' runs the fastest that can"
        )


def _reasons(steps: list[Step]) -> str:
    """Paths that ran instead, and why."""
    return "; ".join(dict.fromkeys(f"{step.path}: {step.why}" for step in steps)) or "no path has one"
