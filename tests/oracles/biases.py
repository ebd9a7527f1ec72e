"""What scores gain by positions, pair by pair: ALiBi, T5's buckets, Transformer-XL; other oracles ask for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

HEADS = 2  # of the tests; ALiBi's slopes depend on it


def score(bias: Any, w: Any, q: Tensor, k: Tensor, offset: int, *, head: int, scale: float) -> Tensor:
    """The score of a query and the key ``offset`` positions after it; ``scale q . k`` without a bias."""
    name = type(bias).__name__
    if bias is None:
        return scale * (q * k).sum()
    if name == "ALiBi":
        slope = 2 ** (-8 * (head + 1) / HEADS) if bias.slopes is None else bias.slopes[head]
        return scale * (q * k).sum() - slope * abs(offset)
    if name == "T5Buckets":
        return scale * (q * k).sum() + w.table[head, bucket(bias, offset)]
    assert name == "TransformerXL", f"no oracle for {name}"
    W = w.projection[head]
    R = torch.zeros_like(q)
    for c, angle in enumerate(angles(-offset, len(W))):
        R = R + angle * W[c]
    return scale * ((q + w.u[head]) @ k + (q + w.v[head]) @ R)


def bucket(bias: Any, offset: int) -> int:
    """One bucket for each of the nearest distances, then buckets whose borders grow by a constant factor."""
    number, first = bias.num_buckets, 0
    if bias.bidirectional:
        number //= 2
        first = number if offset > 0 else 0
    distance = abs(offset) if bias.bidirectional else max(-offset, 0)
    exact = number // 2
    if distance < exact:
        return first + distance
    b, factor = exact, (bias.max_distance / exact) ** (1 / (number - exact))
    while b < number - 1 and distance >= exact * factor ** (b + 1 - exact):
        b += 1
    return first + b


def angles(distance: int, width: int) -> list[float]:
    """Sines, then cosines, of the distance at wavelengths from 2 pi to 10000 times as much."""
    frequencies = [10000 ** (-2 * c / width) for c in range((width + 1) // 2)]
    return [math.sin(distance * f) for f in frequencies] + [math.cos(distance * f) for f in frequencies][: width // 2]


ORACLES: dict[str, Any] = {}
VARIANTS: list[str] = []
