"""What kernels are given where a tensor may be missing, and sizes that are powers of two."""

from __future__ import annotations

from torch import Tensor


def some(x: Tensor | None, other: Tensor) -> Tensor:
    """``x``, or a tensor that is not read where there is none."""
    return other if x is None else x


def strides(mask: Tensor | None) -> tuple[int, int]:
    """Of batch and heads."""
    return (0, 0) if mask is None else (mask.stride(0), mask.stride(1))


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
