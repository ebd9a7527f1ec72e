"""What an attention function needs of the calls around it and does not get as an argument: the cache, who asked for
attention matrices, and whether the tokens' positions were given. It belongs to the calls and never to a module, which
several threads may call at once.

The calls of a thread lie on one another as they do in Python. They are held in a ``threading.local``, which
``torch.compile`` follows, unlike a ``ContextVar``: a forward pass is never suspended for another in its thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class Open:
    """A call that has begun and not ended."""

    of: nn.Module  # the model or attention module that is called
    outer: Open | None
    shown: tuple[nn.Module, ...] = ()  # layers that are asked for their attention matrices
    positions: bool = False  # of a model: whether it was given position_ids, which may begin anew within a row
    cache: Any = None  # of an attention module: where its state is kept
    attended: bool = False  # of an attention module: whether its attention function was called


class _Thread(threading.local):
    def __init__(self) -> None:
        self.innermost: Open | None = None


_thread = _Thread()


def begin(module: nn.Module, *, shown: tuple[nn.Module, ...] = (), positions: bool = False, cache: Any = None) -> None:
    """A call of ``module`` begins. An earlier one that an interrupt left open is over, with all inside."""
    stale = _find(module)
    outer = _thread.innermost if stale is None else stale.outer
    _thread.innermost = Open(module, outer, shown, positions, cache)


def end(module: nn.Module) -> Open | None:
    """The call of ``module`` ends, with all that an error left open inside; None where none had begun."""
    found = _find(module)
    if found is not None:
        _thread.innermost = found.outer
    return found


def present(module: nn.Module) -> Open | None:
    """The innermost call, where it is one of ``module``."""
    found = _thread.innermost
    return found if found is not None and found.of is module else None


def shows(layer: nn.Module) -> bool:
    """Whether a call around this one asks for the attention matrices of ``layer``."""
    found = _thread.innermost
    while found is not None:
        if any(one is layer for one in found.shown):
            return True
        found = found.outer
    return False


def positions() -> bool:
    """Whether a call around this one was given ``position_ids``."""
    found = _thread.innermost
    while found is not None and not found.positions:
        found = found.outer
    return found is not None


def _find(module: nn.Module) -> Open | None:
    found = _thread.innermost
    while found is not None and found.of is not module:
        found = found.outer
    return found
