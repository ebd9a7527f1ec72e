"""Tensors of kernels before a launch: layouts and strides, and where they launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fast_attention.engine.operation import Fast, Operation

Pass = TypeVar("Pass", bound=Callable[..., Any])


def launched(run: Pass) -> Pass:
    """A pass on the device of its first tensor: Triton launches on the current one."""

    @functools.wraps(run)
    def wrapped(*given: Any, **settings: Any) -> Any:
        with torch.cuda.device_of(given[0] if isinstance(given[0], Tensor) else given[0][0]):
            return run(*given, **settings)

    return wrapped  # type: ignore[return-value]


def kernels(
    plain: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any], like: Callable[..., Any],
    *, outputs: int = 1,
) -> Operation:  # fmt: skip
    """Kernels beside the same function in operations that autograd follows, for gradients of gradients."""
    return Operation(
        plain, cuda=Fast(forward, backward, halves=True, like=like, outputs=outputs), compute=torch.float32
    )


def contiguous(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose numbers of one token lie side by side, as kernels read them."""
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]


def as_bytes(key_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A key mask as kernels read it, for the tokens of ``like``."""
    if key_mask is None:
        return None
    rows = key_mask if key_mask.stride(-1) == 1 else key_mask.contiguous()
    return rows.view(torch.uint8).expand(like.shape[:-1])


def rest_like(out: Tensor, keep: bool) -> Tensor:
    """Room for what rounding takes of outputs, where they are rounded and it is kept."""
    return out.new_empty(out.shape if keep and out.dtype != torch.float32 else (0,))


def some(x: Tensor | None, other: Tensor) -> Tensor:
    """``x``, or a tensor that is not read where there is none."""
    return other if x is None else x


def strides(mask: Tensor | None) -> tuple[int, int]:
    """Strides of batch and heads."""
    return (0, 0) if mask is None else (mask.stride(0), mask.stride(1))


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
