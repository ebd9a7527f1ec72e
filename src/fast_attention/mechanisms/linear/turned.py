"""ReLU features turned by an angle that grows with the position, so that their products fall with the distance."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fast_attention.engine import dispatch, overflow
from fast_attention.feature_maps.feature_map import InPlace
from fast_attention.mechanisms.linear import fast_linear, fast_linear_causal, fast_linear_noncausal


@dataclass(frozen=True, repr=False)
class Turned(InPlace):
    """``[relu(x_i) cos(a i), relu(x_i) sin(a i)]`` with ``a = pi / 2M``, of tokens i = ``start`` and on.

    Args:
        longest: M, the number of positions for which a quarter of a turn has room.
        start: Position of the first token.
    """

    longest: int
    start: int | Tensor = 0

    def __call__(self, x: Tensor) -> Tensor:
        """The features of every row of ``x``."""
        cos, sin = self._factors(x)
        x = x.relu()
        return torch.cat([x * cos, x * sin], -1)

    def width(self, d: int) -> int:
        """Twice as many."""
        return 2 * d

    def at(self, start: int) -> Turned:
        """The map of tokens that stand ``start`` positions later."""
        return replace(self, start=self.start + start)

    def fill(self, x: Tensor, out: Tensor, workspace: Tensor) -> None:
        """Half by half."""
        torch.clamp_min(x, 0.0, out=workspace)
        for half, factor in zip(out.chunk(2, -1), self._factors(x), strict=True):
            torch.mul(workspace, factor, out=half)

    def vjp(self, x: Tensor, values: Tensor, gradient: Tensor, out: Tensor) -> None:
        """Turned back, where ``x`` is above zero."""
        (cos, sin), (d_cos, d_sin) = self._factors(x), gradient.chunk(2, -1)
        torch.mul(d_cos, cos, out=out).addcmul_(d_sin, sin)
        out.mul_(x > 0.0)

    def _factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device) + self.start
        angles = angles[:, None] * (math.pi / 2 / self.longest)
        return angles.cos(), angles.sin()


def attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, longest: int, eps: float, is_causal: bool
) -> Tensor | None:
    """Linear attention of turned features that are made chunk by chunk in cache; None where that does not serve."""
    if dispatch.obstacle(q, k, v, even=True) or min(q.shape[-2], k.shape[-2]) <= fast_linear.SHORT:
        return None
    if is_causal and q.shape[-2] != k.shape[-2]:
        return None
    phi = Turned(longest)
    dispatch.record("linear attention, features turned chunk by chunk", "cosines of the distance")
    if is_causal:
        out = fast_linear_causal.attention(q, k, v, key_mask, None, None, phi=phi, eps=eps)[0]
    else:
        out = fast_linear_noncausal.attention(q, k, v, key_mask, phi=phi, eps=eps)
    return out if overflow.finite(out) else None
