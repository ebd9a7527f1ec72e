"""Exponentials in half the time of torch's, for loops that spend most of it on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
