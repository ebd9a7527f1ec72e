"""Decoding states: validated against the inputs, selected by sequence (beams), saved and loaded.

A mechanism's part of a state is a NamedTuple of tensors whose leading axis is the batch; numbers of steps, equal for
all, have no axes. A state is a value: decoding never changes it in place, so one can decode from it again.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention import files
from fast_attention.engine import operation
from fast_attention.engine.precision import rebuild
from fast_attention.engine.tracing import traced, wrapped

FORMAT = "fast-attention state 4"


class State(NamedTuple):
    """The state that ``decode`` returns for the next call: its mechanism, the sizes of its inputs, and its content."""

    mechanism: str  # its repr
    batch: tuple[int, ...]  # sequences: the leading sizes before the heads
    heads: int
    widths: tuple[int, ...]  # of queries, keys and values, as far as the mechanism reads them
    dtype: str  # of the inputs
    draw: tuple[float, ...]  # the first of the random numbers it was made with; none where there are none, or not asked
    content: Any  # the mechanism's own state

    def __str__(self) -> str:
        """The state's mechanism and sizes in words, for errors."""
        drawn = f", drawn at random: {', '.join(map(repr, self.draw))} ..." if self.draw else ""
        return (
            f"{self.mechanism}, batch {self.batch}, {self.heads} heads of widths {self.widths} "
            f"(of what it reads of q, k, v), {self.dtype}{drawn}"
        )


class Rows(NamedTuple):
    """States of sequences that do not all begin with the first token: one for all that begin alike."""

    begin: Tensor  # (batch,): the token that each sequence begins with; -1: it has not begun
    length: int  # tokens so far
    states: tuple[Any, ...]  # a mechanism's own states, in the order of ``places``

    def places(self) -> list[int]:
        """The tokens that sequences begin with, ascending."""
        return sorted(set(self.begin.tolist()) - {-1})

    def selected(self, index: Tensor) -> Rows:
        """The sequences ``index``, in this order."""
        begin, states = self.begin[index], []
        for place, state in zip(self.places(), self.states, strict=True):
            number = (self.begin == place).cumsum(0) - 1  # of a sequence among those that begin alike
            if len(chosen := number[index[begin == place]]):
                states.append(select(state, chosen))
        return Rows(begin, self.length, tuple(states))


def empty(mechanism: Any, q: Tensor, k: Tensor, v: Tensor, w: Any) -> State:
    """An empty state of a mechanism with weights ``w`` for inputs (..., H, N, E)."""
    traits = mechanism.traits
    widths = tuple(x.shape[-1] for name, x in (("q", q), ("k", k), ("v", v)) if name in traits.inputs)
    draw = _draw(w if traits.random else ())
    return State(mechanism.expression, tuple(v.shape[:-3]), v.shape[-3], widths, str(v.dtype), draw, None)


def _draw(weights: Any) -> tuple[float, ...]:
    """The first two random numbers, to tell draws apart; none where reading them would wait for a device."""
    first = next((x for x in leaves(weights) if not isinstance(x, torch.nn.Parameter)), None)
    if first is None or operation.unsupported_reason(first):
        return ()
    return tuple(first.reshape(-1)[:2].tolist())


def validated(state: Any, expected: State) -> Any:
    """The mechanism's own state in ``state``, after validation; None at the start.

    Raises:
        ValueError: It is no state, or of another mechanism, batch, heads, widths, dtype or random draw than
            ``expected``.
    """
    if state is None:
        return None
    if not isinstance(state, State):
        raise ValueError(f"state is a {type(state).__name__}: hand over what decode, summarise or combine returned")
    if state[:5] != expected[:5] or (state.draw and expected.draw and state.draw != expected.draw):
        raise ValueError(f"the state is of {state}; this call is of {expected}")
    return state.content


def copy_if_aliased(content: Any, *inputs: Tensor | None, at_start: bool) -> Any:
    """A mechanism's state with copies of what lies in the memory of ``inputs``: the caller may write there again.

    Tensors without memory, of traced code, are copied ``at_start``: a first state may be the caller's tensors.
    """
    has_memory = not traced() and not wrapped(inputs)
    memory = {x.untyped_storage().data_ptr() for x in inputs if has_memory and x is not None}

    def unaliased(x: Tensor) -> Tensor:
        return x.clone() if (x.untyped_storage().data_ptr() in memory if has_memory else at_start) else x

    return _mapped(content, unaliased, 0)


def select(state: Any, index: Tensor) -> Any:
    """The state of the sequences ``index`` of a batch, in this order, repeated if named twice: beam search's reorder.

    Args:
        state: What ``decode`` returned for inputs (B, H, N, E).
        index: Whole numbers (any count,) from 0 to B - 1, on the state's device.

    Raises:
        TypeError: ``index`` is no tensor.
        ValueError: It is not a row of whole numbers within the batch.
    """
    if not isinstance(index, Tensor):
        raise TypeError(f"index must be a torch.Tensor of whole numbers; got {type(index).__name__}")
    tensors = leaves(state)
    batch = max((x.shape[0] for x in tensors if x.ndim), default=1)
    if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"index must be a row of whole numbers; got shape {tuple(index.shape)}, {index.dtype}")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < batch:
        raise ValueError(f"index reaches from {int(index.min())} to {int(index.max())}; the state's batch is {batch}")

    rows = index.long()  # torch takes bytes for a mask

    def select_rows(x: Tensor) -> Tensor:
        if x.ndim == 0:
            return x
        return x.expand(batch, *x.shape[1:])[rows] if x.shape[0] == 1 else x[rows]

    return _mapped(state, select_rows, len(index), rows)


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a state of decoding to a file, whole or not at all.

    Args:
        state: A state that a module or a mechanism returned.
        path: The file. One that is there is replaced when the new one is complete.
    """
    with files.atomic(path) as partial:
        torch.save({"format": FORMAT, "state": _encoded(state)}, partial)


def load(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Any:
    """Load the state that ``save`` wrote, equal to the bit. Nothing in the file is executed.

    Raises:
        ValueError: The file holds no state.
    """
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, this version reads {FORMAT!r}")
        return _decoded(content["state"])
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} holds no decoding state of this library: {error}") from error


def leaves(state: Any) -> list[Tensor]:
    """The tensors of a state, or of weights."""
    if isinstance(state, Tensor):
        return [state]
    return [x for part in state for x in leaves(part)] if isinstance(state, tuple) else []


def _mapped(state: Any, change: Any, batch: int, pick: Tensor | None = None) -> Any:
    """A state with every tensor changed, or of which sequences are picked."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, Rows) and pick is not None:
        return state.selected(pick)
    if isinstance(state, State):
        if not state.batch:
            raise ValueError(f"the state is of {state}: it has no batch to pick sequences from")
        return state._replace(batch=(batch, *state.batch[1:]), content=_mapped(state.content, change, batch, pick))
    return rebuild(state, [_mapped(part, change, batch, pick) for part in state]) if isinstance(state, tuple) else state


def _encoded(state: Any) -> Any:
    """The state as plain containers, so that loading needs no pickled classes; of tensors what they show."""
    if isinstance(state, Tensor):
        return state if state.untyped_storage().nbytes() == state.nbytes else state.clone()
    if not isinstance(state, tuple):
        return state
    kind = type(state)
    return {"kind": f"{kind.__module__}:{kind.__name__}", "parts": [_encoded(part) for part in state]}


def _decoded(encoded: Any) -> Any:
    if not isinstance(encoded, dict):
        return encoded
    parts = [_decoded(part) for part in encoded["parts"]]
    module, _, name = encoded["kind"].partition(":")
    if module == "builtins":
        return tuple(parts)
    if not module.startswith("fast_attention.") and module not in sys.modules:
        raise ValueError(f"it names {encoded['kind']!r}: import the module {module} first")
    kind: Any = getattr(importlib.import_module(module), name)
    if not isinstance(kind, type) or not issubclass(kind, tuple) or len(getattr(kind, "_fields", ())) != len(parts):
        raise ValueError(f"{encoded['kind']!r} is no state of {len(parts)} parts")
    return kind(*parts)


__all__ = [
    "load", "save", "select",
]  # fmt: skip
