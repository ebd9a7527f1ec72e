"""Tells whether operations are traced or transformed: then no fast path may look at numbers or write in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

Record = TypeVar("Record", bound=Any)
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY
_ORDINARY = torch._C._disabled_torch_dispatch_impl


def traced() -> bool:
    """Whether ``torch.compile``, ``torch.export``, ``torch.jit.trace``, ``torch.func``, ``make_fx``, ``FakeTensorMode``
    or forward-mode derivatives run: numbers may be unknown, operations such as can be differentiated or mapped.
    """
    return symbolic() or intercepted()


def intercepted() -> bool:
    """``traced`` where no compiler runs."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or (torch._C._len_torch_dispatch_stack() > 0 and _recording())
    )


def _recording() -> bool:
    """Whether fake tensors or ``make_fx`` are among the dispatch modes."""
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in (_FAKE, _PROXY))


def symbolic() -> bool:
    """Whether ``torch.compile`` or ``torch.export`` records this code: numbers are unknown, and sizes may be symbols,
    which no branch may compare.
    """
    return torch.compiler.is_compiling()


def exporting() -> bool:
    """Whether ``torch.export`` runs, and nothing else: lengths are open, and kernels are chosen later.

    ``torch.compiler.is_exporting()`` says so within ``torch.compile`` too, up to torch 2.11.
    """
    return torch.compiler._is_exporting_flag


def replaced(record: Record, **changes: Any) -> Record:
    """``record._replace(**changes)`` of a NamedTuple, in a form that torch 2.11's compiled code can return."""
    return type(record)(*(changes.get(name, value) for name, value in zip(record._fields, record, strict=True)))


def transformed() -> bool:
    """Whether forward-mode derivatives, second derivatives or batched functions (vmap) are being computed.

    torch's fused attention has none of these; one gradient it has.
    """
    if symbolic():
        return False
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    stack = get_interpreter_stack() or []
    return len(stack) > 1 or any(transform.key() != TransformType.Grad for transform in stack)


def unrepeatable() -> bool:
    """Whether eager code may leave nothing to a backward pass that computes again: ``torch.func`` and forward-mode
    derivatives know of no such pass, and ``parametrize.cached()`` hands it weights that were made without a graph.
    """
    if symbolic():
        return False
    is_cached = parametrize._cache_enabled > 0
    return is_cached or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def wrapped(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of the tensors overrides operations (a fake or a distributed tensor, say)."""
    return any(x is not None and type(x).__torch_dispatch__ is not _ORDINARY for x in tensors)  # type: ignore[attr-defined]


def batched(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors stands for a batch of them (``vmap``, ``is_grads_batched``)."""
    return any(is_legacy_batchedtensor(x) or is_batchedtensor(x) for x in tensors)
