"""A stack of each thread's active module calls, for what an attention function needs and does not get as an argument:
the cache, whether attention matrices were asked for, the tokens' positions and the borders of packed rows.

None of it is kept in modules, which several threads may call at once. The stack is a ``threading.local``, which
``torch.compile`` can trace, unlike a ``ContextVar``; a forward pass is never suspended for another in its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class ActiveCall:
    """A call that has begun and not ended."""

    module: nn.Module  # the model or attention module that is called
    outer: ActiveCall | None
    shown: tuple[nn.Module, ...] = ()  # layers that are asked for their attention matrices
    position_ids: Tensor | None = None  # of a model: as it was given them; they may begin anew within a row
    packed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # of a model: the borders of a packed row
    arguments: frozenset[str] = frozenset()  # of a model: the names of all that it was given
    cache: Any = None  # of an attention module: where its state is kept
    adds_positions: bool = False  # of an attention module: whether its mechanism adds positions to the scores
    attended: bool = False  # of an attention module: whether its attention function was called


class _Thread(threading.local):
    def __init__(self) -> None:
        self.innermost: ActiveCall | None = None


_thread = _Thread()


def begin(
    module: nn.Module, *, shown: tuple[nn.Module, ...] = (), position_ids: Tensor | None = None,
    packed: dict[str, Tensor] | None = None, arguments: frozenset[str] = frozenset(), cache: Any = None,
    adds_positions: bool = False,
) -> None:  # fmt: skip
    """Push a call of ``module``. An earlier one that an interrupt left open is removed, with all inside it."""
    interrupted = _find(module)
    outer = _thread.innermost if interrupted is None else interrupted.outer
    _thread.innermost = ActiveCall(module, outer, shown, position_ids, packed or {}, arguments, cache, adds_positions)


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


def is_part(module: nn.Module) -> bool:
    """Whether a call around the innermost one is of a model that ``module`` is a part of."""
    call = _thread.innermost
    while call is not None:  # another model's may stand here, which an interrupt left open
        if call.module is not module and any(part is module for part in call.module.modules()):
            return True
        call = call.outer
    return False


def is_argument(name: str) -> bool:
    """Whether a call around this one was given an argument of that name, which is then not a layer's making.

    Where gradient checkpointing computes a layer again, in the backward pass, the model's call is over: so it was then.
    """
    if computed_again():
        return True
    call = _thread.innermost
    while call is not None and name not in call.arguments:
        call = call.outer
    return call is not None


def computed_again() -> bool:
    """Whether the backward pass runs, in which gradient checkpointing computes a layer again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def continues(cache: Any) -> bool:
    """Whether an attention module is being called that keeps its state in ``cache``."""
    call = _thread.innermost
    while call is not None and call.cache is not cache:
        call = call.outer
    return call is not None


def shows(layer: nn.Module) -> bool:
    """Whether a call around this one asks for the attention matrices of ``layer``."""
    call = _thread.innermost
    while call is not None:
        if any(shown_layer is layer for shown_layer in call.shown):
            return True
        call = call.outer
    return False


def shows_any() -> bool:
    """Whether a call around this one asks for attention matrices."""
    call = _thread.innermost
    while call is not None and not call.shown:
        call = call.outer
    return call is not None


def position_ids() -> Tensor | None:
    """The ``position_ids`` that the innermost call with some was given."""
    call = _thread.innermost
    while call is not None and call.position_ids is None:
        call = call.outer
    return None if call is None else call.position_ids


def packed() -> Iterator[dict[str, Tensor]]:
    """The borders of packed rows that the calls around this one were given, the innermost first."""
    call = _thread.innermost
    while call is not None:
        if call.packed:
            yield call.packed
        call = call.outer


def _find(module: nn.Module) -> ActiveCall | None:
    call = _thread.innermost
    while call is not None and call.module is not module:
        call = call.outer
    return call
