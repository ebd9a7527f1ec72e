"""Where a token stands: learned tables, sinusoids, and rotary positions, which turn queries and keys by their place."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

Positions = Literal["learned", "sinusoidal", "rotary", "none"]


def _angles(length: int, width: int, start: int | Tensor, device: torch.device) -> Tensor:
    """Place times rate (..., length, (width + 1) // 2), in float64: in float32 a place in the millions has no angle."""
    exact = torch.device("cpu") if device.type == "mps" else device  # which knows no float64
    rate = torch.exp(torch.arange(0, width, 2, device=exact, dtype=torch.float64) * (-math.log(10_000.0) / width))
    place = torch.arange(length, device=exact)[:, None]
    return (place + (start.to(exact)[..., None, None] if isinstance(start, Tensor) else start)) * rate


def sinusoids(
    length: int,
    width: int,
    start: int = 0,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Float[Tensor, "length width"]:
    """Sines of the even and cosines of the odd channels (arXiv 1706.03762, section 3.5), from place ``start`` on."""
    angles = _angles(length, width, start, device)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[:, :width]


def rotate(x: Float[Tensor, "*batch length width"], start: int | Tensor = 0) -> Float[Tensor, "*batch length width"]:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864, Eq. 34): channel pairs turned by angles that grow with place.

    ``rotate(q) . rotate(k)`` depends on the places only through their difference.

    Args:
        x: Queries or keys, an even width; channel i is paired with channel i + width / 2.
        start: Place of the first token; a tensor broadcastable to x's leading axes for sequences that start apart.
    """
    half = x.shape[-1] // 2
    if 2 * half != x.shape[-1]:
        raise ValueError(f"rotary positions turn pairs of channels; the width {x.shape[-1]} is odd")
    angles = _angles(x.shape[-2], x.shape[-1], start, x.device)
    sine, cosine = angles.sin().to(x), angles.cos().to(x)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class PositionTable(nn.Module):
    """Learned or sinusoidal positions, added to the tokens.

    Args:
        kind: ``"learned"`` (drawn with deviation 0.02) or ``"sinusoidal"`` (any length).
        width: Width of the tokens.
        max_len: Longest sequence of the learned table.
    """

    def __init__(self, kind: Positions, width: int, max_len: int) -> None:
        super().__init__()
        self.kind, self.max_len = kind, max_len
        self.table = nn.Parameter(torch.randn(max_len, width) * 0.02) if kind == "learned" else None

    def forward(self, x: Float[Tensor, "*batch length width"], start: int = 0) -> Float[Tensor, "*batch length width"]:
        """Tokens with their positions from ``start`` on."""
        length = x.shape[-2]
        if self.table is None:
            return x + sinusoids(length, x.shape[-1], start, x.device).to(x)
        if start + length > self.max_len:
            raise ValueError(f"the model has learned positions for {self.max_len} tokens and got {start + length}")
        return x + self.table[start : start + length]
