"""What every family of kernels can do, so that one walk and one self-check serve all: see ``Forms``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Forms(NamedTuple):
    """Four functions of heads (B, H, n, width), masks (B, H, n) or (B, 1, n), and states in a row (B, H, numbers).

    ``scan(q, k, v, key_mask, first)``: causal outputs behind a state, and the state after; ``sums(k, v, key_mask)``:
    the state after some keys; ``read(q, state)``: outputs of queries that see all of a state;
    ``step(q, k, v, key_mask, state)``: as ``scan`` of one token, without gradients. ``sums`` and ``read`` are None
    where only causal calls have kernels.
    """

    scan: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
    sums: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None
    read: Callable[[Tensor, Tensor], Tensor] | None
    step: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
