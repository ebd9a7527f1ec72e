"""What one does with a decoding state: pick sequences of a batch (beams), save it, load it again.

A state is a NamedTuple of tensors whose leading axis is the batch; numbers of steps, equal for all, have no axes. It
is a value: decoding never changes one in place, so an older state can be decoded on from as often as one likes.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

from fast_attention import files
from fast_attention.ops.precision import rebuild


def select(state: Any, index: Tensor) -> Any:
    """The state of the sequences ``index`` of a batch, in this order and as often as named: beam search's reorder.

    Args:
        state: What ``decode`` returned for inputs (B, H, N, E).
        index: Whole numbers (any count,) from 0 to B - 1, on the state's device.

    Raises:
        ValueError: ``index`` is not a row of whole numbers within the batch.
    """
    tensors = list(_leaves(state))
    batch = max((x.shape[0] for x in tensors if x.ndim), default=1)
    if index.ndim != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"index must be a row of whole numbers; got shape {tuple(index.shape)}, {index.dtype}")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < batch:
        raise ValueError(f"index reaches from {int(index.min())} to {int(index.max())}; the state's batch is {batch}")

    def picked(x: Tensor) -> Tensor:
        if x.ndim == 0:
            return x
        return x.expand(batch, *x.shape[1:])[index] if x.shape[0] == 1 else x[index]

    return _mapped(state, picked)


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a state to a file: to a temporary name, synced, then renamed, so that no half-written file is ever seen."""
    content = {"format": "fast-attention state 1", "state": _described(state)}
    with files.whole(path) as partial:
        torch.save(content, partial)


def load(path: str | os.PathLike[str], device: torch.device | str | None = None) -> Any:
    """The state that ``save`` wrote, equal to the bit. Nothing in the file is executed.

    Raises:
        ValueError: The file holds no state.
    """
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        if content["format"] != "fast-attention state 1":
            raise ValueError(f"its format is {content['format']!r}")
        return _built(content["state"])
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} holds no decoding state of this library: {error}") from error


def _leaves(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [x for part in state for x in _leaves(part)] if isinstance(state, tuple) else []


def _mapped(state: Any, change: Any) -> Any:
    if isinstance(state, Tensor):
        return change(state)
    return rebuild(state, [_mapped(part, change) for part in state]) if isinstance(state, tuple) else state


def _described(state: Any) -> Any:
    """Plain containers only, so that loading needs no pickled classes."""
    if not isinstance(state, tuple):
        return state
    kind = type(state)
    return {"kind": f"{kind.__module__}:{kind.__name__}", "parts": [_described(part) for part in state]}


def _built(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    parts = [_built(part) for part in described["parts"]]
    module, _, name = described["kind"].partition(":")
    if module == "builtins":
        return tuple(parts)
    if not module.startswith("fast_attention."):
        raise ValueError(f"it names {described['kind']!r}, which is not ours")
    kind: Any = getattr(importlib.import_module(module), name)
    if not issubclass(kind, tuple) or len(getattr(kind, "_fields", ())) != len(parts):
        raise ValueError(f"{described['kind']!r} is no state of {len(parts)} parts")
    return kind(*parts)
