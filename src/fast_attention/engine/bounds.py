"""Bounds numbers with a gradient of 1 at the bound itself, with every torch: ``clamp``'s became 0 there in torch 2.15.

It matters where numbers meet their bound by construction, as the largest key minus the running maximum does.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def at_most(x: Float[Tensor, "*sizes"], bound: float) -> Float[Tensor, "*sizes"]:
    """``min(x, bound)``: slope 1 up to the bound and at it, 0 beyond."""
    return x.masked_fill(x > bound, bound)


def no_less(x: Float[Tensor, "*sizes"], bound: float) -> Float[Tensor, "*sizes"]:
    """``max(x, bound)``: slope 1 down to the bound and at it, 0 beyond."""
    return x.masked_fill(x < bound, bound)


MOST = 1e13  # of a coordinate: squared norms and scores are numbers in float32, and half of them above ``scan.FLOOR``


def bounded(x: Float[Tensor, "*sizes"]) -> Float[Tensor, "*sizes"]:
    """``x`` with every coordinate within ``MOST``, so that no logarithm that is made of it is infinite."""
    return x if x.dtype == torch.float16 else x.clamp(-MOST, MOST)  # float16 has no such numbers
