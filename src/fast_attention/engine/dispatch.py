"""Decides whether a hand-written fast path may run, records which path a call takes, and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fast_attention import core
from fast_attention.engine.tracing import exporting, symbolic, traced, wrapped

Implementation = Literal["auto", "reference", "core", "triton"]
HAS_TRITON = importlib.util.find_spec("triton") is not None  # it is not imported here
HALVES_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


class Step(NamedTuple):
    """One choice: what ran, why it and not something else, and with which sizes."""

    path: str
    why: str
    sizes: dict[str, int]


_trace: ContextVar[list[Step] | None] = ContextVar("dispatch_trace", default=None)
ASKED = "the reference was asked for"
KERNEL, CORE = "Triton kernel", "compiled core"  # how the names of their paths begin
_asked: ContextVar[Implementation] = ContextVar("implementation", default="auto")


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
    if _asked.get() == "reference":
        return ASKED
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


def gpu_obstacle(*tensors: Tensor, widest: int) -> str:
    """Why no Triton kernel may run on these tensors; empty where one may.

    Args:
        tensors: What the kernel reads; at least one.
        widest: The most numbers of a token that it takes.
    """
    first = tensors[0]
    if not on_gpu(first):
        return "not on a GPU"
    if not symbolic() and _asked.get() == "reference":
        return ASKED
    if exporting() or (traced() and not symbolic()):
        return "traced"
    if any(x.dtype != first.dtype for x in tensors) or first.dtype not in HALVES_AND_SINGLE:
        return "dtypes that differ, or of more than 32 bits"
    if max(x.shape[-1] for x in tensors) > widest:
        return f"heads of more than {widest} numbers"
    if not symbolic() and (wrapped(tensors) or any(x.numel() == 0 for x in tensors)):
        return "a tensor that overrides operations, or no tokens"
    return "" if HAS_TRITON else "Triton is not installed"


def unserved(x: Tensor, why: str) -> None:
    """Record that a kernel did not run where one could have been hoped for: on a GPU, or asked for by name."""
    if not symbolic() and (on_gpu(x) or _asked.get() == "triton"):
        record("plain operations", why)


def on_gpu(x: Tensor) -> bool:
    """Whether kernels for GPUs can read ``x``."""
    return x.is_cuda


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
    token = _asked.set(name)
    try:
        with recorded() as steps:
            yield
    finally:
        _asked.reset(token)
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
    """What ran instead, and why."""
    return "; ".join(dict.fromkeys(f"{step.path}: {step.why}" for step in steps)) or "no path has one"


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
