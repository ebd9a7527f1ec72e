"""Products of the blocks of all heads, written where they belong: slices of blocks are not copied to be multiplied."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def multiply(
    a: Float[Tensor, "heads blocks rows inner"],
    b: Float[Tensor, "heads blocks inner columns"],
    *,
    out: Float[Tensor, "heads blocks rows columns"],
    add: bool = False,
) -> None:
    """Write ``a @ b`` into ``out``, or add it: at once, or head by head where some blocks are a slice of more.

    ``torch.matmul`` would copy such slices, and its ``out`` twice.
    """
    if all(_is_flat(x) for x in (a, b, out)):
        parts = [(a.flatten(0, 1), b.flatten(0, 1), out.flatten(0, 1))]
    else:
        axis = 0 if len(a) <= a.shape[1] else 1
        parts = list(zip(a.unbind(axis), b.unbind(axis), out.unbind(axis), strict=True))
    for x, y, into in parts:
        into.baddbmm_(x, y) if add else torch.bmm(x, y, out=into)


def _is_flat(x: Tensor) -> bool:
    return 1 in x.shape[:2] or x.stride(0) == x.shape[1] * x.stride(1)
