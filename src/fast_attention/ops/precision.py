"""Low precision in, low precision out, float32 or better in between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)

Function = TypeVar("Function", bound=Callable[..., Any])


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
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        args = tuple([widen(value) for value in args])
        kwargs = {name: widen(value) for name, value in kwargs.items()}
        if torch.is_autocast_enabled(first.device.type):
            with torch.autocast(first.device.type, enabled=False):
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            return result.to(first.dtype)
        return (result[0].to(first.dtype), *result[1:]) if type(result) is tuple else result

    return wrapped  # type: ignore[return-value]
