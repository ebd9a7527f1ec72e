"""Numbers within bounds: minima and maxima with torch's gradient at the bound, exponentials, factors against overflow.

``clamp``'s gradient at the bound itself became 0 in torch 2.15. It matters where numbers meet their bound by
construction, as the largest key minus the running maximum does: ``at_most`` and ``no_less`` give 1 with every torch.

``factor`` is a power of two that brings numbers down to where their sums of products fit into the dtype. It is exact:
what is scaled by it and divided by it again is what it was; 1 for ordinary numbers.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.tracing import traced


def at_most(x: Float[Tensor, "*sizes"], bound: float) -> Float[Tensor, "*sizes"]:
    """``min(x, bound)``: slope 1 up to the bound and at it, 0 beyond."""
    return x.masked_fill(x > bound, bound)


def no_less(x: Float[Tensor, "*sizes"], bound: float) -> Float[Tensor, "*sizes"]:
    """``max(x, bound)``: slope 1 down to the bound and at it, 0 beyond."""
    return x.masked_fill(x < bound, bound)


MOST = 1e13  # of a coordinate: squared norms and scores are numbers in float32, and half of them above ``scan.FLOOR``


def clamp(x: Float[Tensor, "*sizes"]) -> Float[Tensor, "*sizes"]:
    """``x`` with every coordinate within ``MOST``, so that no logarithm that is made of it is infinite."""
    return x if x.dtype == torch.float16 else x.clamp(-MOST, MOST)  # float16 has no such numbers


LOG2E = math.log2(math.e)


def exp_(x: Tensor) -> Tensor:
    """``e^x`` in place, as ``2^(x log2 e)`` in float32, which takes half the time on a CPU. No gradient.

    The relative error grows by ``|x|`` units in the last place, as much as an ``x`` of that size carries by itself.
    """
    return x.mul_(LOG2E).exp2_() if _by_two(x) else x.exp_()


def exp(x: Tensor, out: Tensor) -> Tensor:
    """``e^x`` into ``out``, computed as ``exp_`` does, without a copy."""
    if _by_two(x):
        return torch.mul(x, LOG2E, out=out).exp2_()
    return torch.exp(x, out=out)


def _by_two(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32  # a property of torch's kernels, not of ours


def factor(x: Float[Tensor, "*sizes"], limit: float, *, rows: bool = False) -> Tensor:
    """A factor that brings the largest magnitude in ``x`` down to about ``limit``: one number, or (..., 1) for every
    row.

    1 where nothing is above ``limit``, and where something is not finite: that must not move the others.
    """
    if not traced() and x.numel() == 0:
        return x.new_ones(())
    size = x.detach().abs()
    top = size.amax(-1, keepdim=True) if rows else size.flatten().amax(0)  # ONNX has no amax of all axes
    excess = torch.log2(top / limit).ceil().clamp_min(0.0)
    return torch.exp2(-excess.masked_fill(~excess.isfinite(), 0.0))


def nan_if_infinite(sums: Tensor) -> Tensor:
    """Divisors, with NaN where they overflowed: a finite number over infinity would be a silent zero."""
    return sums if traced() else sums.fmod(float("inf"))


def finite(out: Tensor) -> bool:
    """Whether all of ``out`` is finite, by its sum: a false alarm costs time."""
    return math.isfinite(out.sum().item())
