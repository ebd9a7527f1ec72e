"""Any length in blocks: pad the sequence axis to a multiple, split it, and cut it back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pad_length(x: Tensor, multiple: int, *, axis: int = -2, value: float = 0.0) -> Tensor:
    """``x`` with ``axis`` (-1 or -2) lengthened by ``value`` to the next multiple."""
    missing = -x.shape[axis] % multiple
    if not torch.compiler.is_compiling() and missing == 0:  # a traced length is a symbol: never ask it
        return x
    return F.pad(x, (0, 0, 0, missing) if axis == -2 else (0, missing), value=value)


def split(x: Tensor, size: int) -> Tensor:
    """(..., L, E) -> (..., ceil(L / size), size, E), zero-padded at the end."""
    return pad_length(x, size).unflatten(-2, (-1, size))


def split_mask(key_mask: Tensor, size: int) -> Tensor:
    """(..., L) -> (..., ceil(L / size), size): positions past the end may not be seen."""
    return pad_length(key_mask, size, axis=-1, value=False).unflatten(-1, (-1, size))


def join(blocks: Tensor, length: int) -> Tensor:
    """(..., n, size, E) -> (..., length, E): the inverse of ``split``."""
    return blocks.flatten(-3, -2)[..., :length, :]
