"""Fuses elementwise mathematics by ``torch.compile``: off unless the caller allows it, absent if it fails.

A fused function reads and writes memory once where eager operations do so at every step. The cost is seconds of
compiling for every new set of shapes, and a C++ compiler on the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fast_attention.engine import dispatch
from fast_attention.engine.tracing import traced

Fusion = Literal["off", "auto"]
_allowed: ContextVar[bool] = ContextVar("fusion", default=False)
_broken: dict[str, str] = {}  # why compiling failed here, by the function's name; it is not tried again


@contextmanager
def fusing(mode: Fusion) -> Iterator[None]:
    """Allow (``"auto"``) or forbid (``"off"``) fusion inside; a ``ValueError`` says that ``mode`` is neither."""
    if mode not in get_args(Fusion):
        raise ValueError(f"compile={mode!r}: choose one of {', '.join(get_args(Fusion))}")
    token = _allowed.set(mode == "auto")
    try:
        yield
    finally:
        _allowed.reset(token)


def allowed() -> bool:
    """Whether the caller allows fusion now."""
    return _allowed.get()


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of tensors, compiled where fusion is allowed and a compiler works, itself everywhere else."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    compiled: list[Callable[..., Any]] = []  # compiled at the first call: importing torch's compiler takes seconds

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # a dispatch mode (a counter, say) wants to see the operations, which a compiled function hides
        if traced() or not allowed() or _get_current_dispatch_mode() is not None:
            return function(*args, **kwargs)
        if name not in _broken:
            try:
                if not compiled:
                    compiled.append(torch.compile(function, fullgraph=True))
                result = compiled[0](*args, **kwargs)
            except Exception as error:  # a missing or failing compiler: whatever the reason, the eager form is right
                _broken[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            else:
                dispatch.record(f"{name} fused by torch.compile", 'compile="auto"')
                return result
        dispatch.record(f"{name} eager", f"it could not be compiled here ({_broken[name]})")
        return function(*args, **kwargs)

    return wrapped
