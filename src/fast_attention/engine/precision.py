"""Low precision in, low precision out, float32 or better in between."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fast_attention.engine.tracing import traced

_HALF = (torch.float16, torch.bfloat16)

_NOTHING = nullcontext()

Function = TypeVar("Function", bound=Callable[..., Any])


class Precision(NamedTuple):
    """The autocast settings of a pass forward, for the pass backward that belongs to it.

    Autograd runs a pass backward under the settings of whoever calls ``backward()``, which may be within an autocast
    that the pass forward had left, or outside of the one that it ran in.
    """

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, tensors: Iterable[Tensor | None]) -> Precision:
        """Those in force, for the kind of device that holds the first of ``tensors``."""
        kind = next((x.device.type for x in tensors if x is not None and not x.is_meta), "cpu")
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> AbstractContextManager[Any]:
        """The same once more, without autocast's cache, which would hold cast weights for as long as it lasts."""
        if not self.enabled and not torch.is_autocast_enabled(self.device_type):
            return _NOTHING
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


def rebuild(like: tuple[Any, ...], parts: list[Any]) -> Any:
    """A tuple of the same kind (NamedTuples keep theirs) with other parts."""
    kind: Any = type(like)
    return tuple(parts) if kind is tuple else kind(*parts)


def widen(value: Any) -> Any:
    """The same value with every float16 or bfloat16 tensor in it (tuples are searched) as float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, tuple):
        return rebuild(value, [widen(part) for part in value])
    return value


def in_float32(function: Function) -> Function:
    """Run ``function`` with sums and normalisers in float32 or better, whatever the inputs and autocast say.

    Half-precision tensors among the arguments are widened, autocast is off inside, and the result takes the dtype of
    the first tensor argument. Of a plain tuple only the first part is narrowed, of a NamedTuple none: states stay wide.
    The pass backward is in float32 too, also where ``backward()`` is called inside autocast.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        args = tuple([widen(value) for value in args])
        kwargs = {name: widen(value) for name, value in kwargs.items()}
        if not first.is_meta and torch.is_autocast_enabled(first.device.type):
            since = torch.autograd._get_sequence_nr()  # type: ignore[reportPrivateImportUsage]
            with torch.autocast(first.device.type, enabled=False):
                result = function(*args, **kwargs)
            _without_autocast(result, since)
        else:
            result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            return result.to(first.dtype)
        return (result[0].to(first.dtype), *result[1:]) if type(result) is tuple else result

    return wrapped  # type: ignore[return-value]


def _without_autocast(results: Any, since: int) -> None:
    """Have the nodes of the graph behind ``results`` that are younger than ``since`` differentiate without autocast.

    Autograd restores what a node's hook sets when the node is done.
    """
    if traced():
        return
    ahead, known = [x.grad_fn for x in _tensors(results)], set[Any]()
    while ahead:
        node = ahead.pop()
        if node is None or node in known or node._sequence_nr() < since or not node.next_functions:
            continue  # of the caller's graph, or a leaf's
        known.add(node)
        node.register_prehook(_leave_autocast)
        ahead += [following for following, _ in node.next_functions]


def _leave_autocast(gradients: tuple[Tensor | None, ...]) -> None:
    for kind in {x.device.type for x in gradients if x is not None}:
        torch.set_autocast_enabled(kind, False)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, tuples searched."""
    if isinstance(value, tuple):
        return [x for part in value for x in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []
