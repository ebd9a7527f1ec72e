"""A stack of each thread's active module calls, for what an attention function needs and does not get as an argument:
the cache, whether attention matrices were asked for, the tokens' positions and the borders of packed rows.

None of it is kept in modules, which several threads may call at once. The stack is a ``threading.local``, which
``torch.compile`` can trace, unlike a ``ContextVar``; a forward pass is never suspended for another in its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class ActiveCall:
    """A call that has begun and not ended."""

    module: nn.Module  # the model or attention module that is called
    outer: ActiveCall | None
    shown: bool = False  # of a model: whether attention matrices were asked for
    position_ids: Tensor | None = None  # of a model: as it was given them; they may begin anew within a row
    packed: dict[str, Tensor] | None = None  # of a model: the borders of a packed row
    arguments: frozenset[str] = frozenset()  # of a model: the names of all that it was given
    cache: Any = None  # of an attention module: where its state is kept
    adds_positions: bool = False  # of an attention module: whether its mechanism adds positions to the scores
    attended: bool = False  # of an attention module: whether its attention function was called


class _Thread(threading.local):
    def __init__(self) -> None:
        self.innermost: ActiveCall | None = None


_thread = _Thread()


def begin(module: nn.Module, **fields: Any) -> ActiveCall:
    """Push a call of ``module``, with fields of ``ActiveCall``.

    An earlier call of it that an interrupt left open is removed, with all inside it.
    """
    interrupted = _find(module)
    outer = _thread.innermost if interrupted is None else interrupted.outer
    call = _thread.innermost = ActiveCall(module, outer, **fields)
    return call


def end(module: nn.Module) -> ActiveCall | None:
    """Pop the call of ``module``, with all that an error left open inside it; None where there was none."""
    call = _find(module)
    if call is not None:
        _thread.innermost = call.outer
    return call


def present(module: nn.Module) -> ActiveCall | None:
    """The innermost call if it is one of ``module``, else None."""
    call = _thread.innermost
    return call if call is not None and call.module is module else None


def is_argument(name: str) -> bool:
    """Whether a call around this one was given an argument of that name, which is then not a layer's making.

    Where gradient checkpointing computes a layer again, in the backward pass, the model's call is over: so it was then.
    """
    if computed_again():
        return True
    return any(name in call.arguments for call in active())


def computed_again() -> bool:
    """Whether the backward pass runs, in which gradient checkpointing computes a layer again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def shows() -> bool:
    """Whether a call around this one asks for attention matrices."""
    return any(call.shown for call in active())


def position_ids() -> Tensor | None:
    """The ``position_ids`` that the innermost call with some was given."""
    return next((call.position_ids for call in active() if call.position_ids is not None), None)


def packed() -> list[dict[str, Tensor]]:
    """The borders of packed rows that the calls around this one were given, the innermost first."""
    return [call.packed for call in active() if call.packed]


def _find(module: nn.Module) -> ActiveCall | None:
    return next((call for call in active() if call.module is module), None)


def active() -> list[ActiveCall]:
    """The calls around this one, the innermost first."""
    around: list[ActiveCall] = []
    call = _thread.innermost
    while call is not None:
        around.append(call)
        call = call.outer
    return around


# What a model ran before or a form of ours: a block can force either, for checks. -------------------------------------

_forced: ContextVar[bool | None] = ContextVar("forced", default=None)


def runs_ours(pays: bool) -> bool:
    """Whether a form of ours runs where it ``pays``; code that ``torch.compile`` traces must not ask."""
    ours = _forced.get()
    return pays if ours is None else ours


def original() -> AbstractContextManager[None]:
    """Run everything in the block as before the swap."""
    return _forcing(False)


def forced() -> AbstractContextManager[None]:
    """Run our forms in the block at any length."""
    return _forcing(True)


@contextmanager
def _forcing(ours: bool) -> Iterator[None]:
    token = _forced.set(ours)
    try:
        yield
    finally:
        _forced.reset(token)
