"""Computes in float32 or better between inputs and outputs of low precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fast_attention.engine.tracing import traced

HALVES = (torch.float16, torch.bfloat16)

_NOTHING = nullcontext()

Function = TypeVar("Function", bound=Callable[..., Any])


class Precision(NamedTuple):
    """The autocast settings of a forward pass, to be restored in its backward pass.

    Autograd runs a backward pass under the settings of whoever calls ``backward()``, which may be within an autocast
    that the forward pass had left, or outside of the one that it ran in.
    """

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, tensors: Iterable[Tensor | None]) -> Precision:
        """The settings in force for the kind of device that holds the first of ``tensors``."""
        kind = next((x.device.type for x in tensors if x is not None and not x.is_meta), "cpu")
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def restored(self) -> AbstractContextManager[Any]:
        """Restore the settings, without autocast's cache, which would hold cast weights for as long as it lasts."""
        if not self.enabled and not torch.is_autocast_enabled(self.device_type):
            return _NOTHING
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


def rebuild(like: tuple[Any, ...], parts: list[Any]) -> Any:
    """A tuple of the kind of ``like`` (a NamedTuple stays one) with other elements."""
    kind: Any = type(like)
    return tuple(parts) if kind is tuple else kind(*parts)


def widen(value: Any) -> Any:
    """Replace every float16 or bfloat16 tensor in a value (tuples are searched) by float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALVES else value
    if isinstance(value, tuple):
        return rebuild(value, [widen(part) for part in value])
    return value


def match_precision(value: Any, like: Tensor) -> Any:
    """Cast the weights in a value to float64 beside float64 tokens, and from float64 to float32 beside others."""
    if isinstance(value, Tensor):
        wide = like.dtype == torch.float64
        if not value.is_floating_point() or (value.dtype == torch.float64) == wide:
            return value
        return value.to(torch.float64 if wide else torch.float32)
    return rebuild(value, [match_precision(part, like) for part in value]) if isinstance(value, tuple) else value


def in_dtype_of_tokens(function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call ``function(x, ...)`` and give outputs in the dtype of x, its tokens, under autocast too; states as they are.

    An autocast to the half precision that the tokens do not have is left: torch's ``cat`` takes no other there.
    """
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return function(x, *args, **kwargs)
    leaves = x.dtype in HALVES and x.dtype != torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False) if leaves else _NOTHING:
        result = function(x, *args, **kwargs)
    return (result[0].to(x.dtype), *result[1:]) if isinstance(result, tuple) else result.to(x.dtype)


def in_float32(function: Function) -> Function:
    """Run ``function`` with sums and normalisers in float32 or better, whatever the inputs and autocast say.

    Half-precision tensors among the arguments are widened, autocast is off inside, and the result takes the dtype of
    the first tensor argument. Of a plain tuple only the first part is narrowed, of a NamedTuple none: states stay wide.
    The backward pass is in float32 too, also where ``backward()`` is called inside autocast.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        args = tuple([widen(value) for value in args])
        kwargs = {name: widen(value) for name, value in kwargs.items()}
        if not first.is_meta and torch.is_autocast_enabled(first.device.type):
            result = outside_autocast(first.device.type, function, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            return result.to(first.dtype)
        return (result[0].to(first.dtype), *result[1:]) if type(result) is tuple else result

    return wrapped  # type: ignore[return-value]


def outside_autocast(device_type: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` without autocast; its backward pass leaves autocast too, wherever ``backward()`` is called."""
    since = 0 if traced() else torch.autograd._get_sequence_nr()  # type: ignore[reportPrivateImportUsage]
    with torch.autocast(device_type, enabled=False):
        result = function(*args, **kwargs)
    _without_autocast(result, since)
    return result


def _without_autocast(results: Any, since: int) -> None:
    """Differentiate without autocast at the graph nodes behind ``results`` that are younger than ``since``.

    Autograd restores what a node's hook sets when the node is done.
    """
    if traced():
        return
    pending, known = [x.grad_fn for x in _tensors(results)], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in known or node._sequence_nr() < since or not node.next_functions:
            continue  # it belongs to the caller's graph, or to a leaf
        known.add(node)
        node.register_prehook(_leave_autocast)
        pending += [following for following, _ in node.next_functions]


def _leave_autocast(gradients: tuple[Tensor | None, ...]) -> None:
    for kind in {x.device.type for x in gradients if x is not None}:
        torch.set_autocast_enabled(kind, False)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, tuples searched."""
    if isinstance(value, tuple):
        return [x for part in value for x in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []
