"""Factors, powers of two, that bring numbers down to where their sums of products fit into the dtype.

Exact, so that what is scaled by them and divided by them again is what it was; 1 for ordinary numbers.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.tracing import traced


def factor(x: Float[Tensor, "*sizes"], limit: float, *, rows: bool = False) -> Tensor:
    """What brings the largest magnitude in ``x`` down to about ``limit``: one number, or (..., 1) for every row.

    1 where nothing is above ``limit``, and where something is not finite: that must not move the others.
    """
    if not traced() and x.numel() == 0:
        return x.new_ones(())
    size = x.detach().abs()
    top = size.amax(-1, keepdim=True) if rows else size.flatten().amax(0)  # ONNX has no amax of all axes
    above = torch.log2(top / limit).ceil().clamp_min(0.0)
    return torch.exp2(-above.masked_fill(~above.isfinite(), 0.0))


def nan_if_infinite(sums: Tensor) -> Tensor:
    """What is divided by, with NaN where it overflowed: a finite number over infinity would be a silent zero."""
    return sums if traced() else sums.fmod(float("inf"))


def finite(out: Tensor) -> bool:
    """Whether all of ``out`` is finite, by its sum: a false alarm costs time."""
    return math.isfinite(out.sum().item())
