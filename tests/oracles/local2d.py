"""Attention in a grid: which tokens stand in the window of rows and columns, or in the block; softmax over them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def over(m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, i: int, seen: list[int], head: int) -> Tensor:
    if not seen:
        return torch.zeros(v.shape[1], dtype=v.dtype, device=v.device) + 0 * q[i].sum()
    scores = [(q[i] * k[j]).sum() * (1 / math.sqrt(q.shape[1]) if m.scale is None else m.scale) for j in seen]
    top = max(float(s.detach()) for s in scores)
    weights = [(s - top).exp() for s in scores]
    total = sum(weights)
    if m.sinks:  # a score more in the normaliser, whose value is zero
        total = total + (w.sinks[head] - top).exp()
    return sum((a * v[j] for a, j in zip(weights, seen, strict=True)), torch.zeros_like(v[0])) / total


def pair_of(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def window_of(at: int, length: int, window: int, dilation: int) -> list[int]:
    """NATTEN's: of the places as far apart as the dilation, the ``window`` ones around ``at``, all inside."""
    like = [place for place in range(length) if (place - at) % dilation == 0]
    before = like.index(at)
    while len(like) > window:  # what is too far before it goes first
        if before > window // 2:
            like, before = like[1:], before - 1
        else:
            like = like[:-1]
    return like


def block_of(at: int, length: int, size: int, shift: int) -> list[int]:
    """Swin's: the places between the same two borders, which stand a block apart, the first at ``shift``."""
    return [place for place in range(length) if math.floor((place - shift) / size) == math.floor((at - shift) / size)]


def in_grid(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Token t stands at row t // width and column t % width; those of the prefix see all and are seen by all."""
    assert not is_causal
    prefix = m.num_prefix_tokens
    height = -(-(len(q) - prefix) // m.width)
    rows = []
    for i in range(len(q)):
        if i < prefix:
            seen = list(range(len(q)))
        else:
            row, column = divmod(i - prefix, m.width)
            if hasattr(m, "window"):
                (down, across), (step, stride) = pair_of(m.window), pair_of(m.dilation)
                near = window_of(row, height, down, step), window_of(column, m.width, across, stride)
            else:
                (down, across), (step, stride) = pair_of(m.block_size), pair_of(m.shift)
                near = block_of(row, height, down, step), block_of(column, m.width, across, stride)
            seen = list(range(prefix)) + [prefix + r * m.width + c for r in near[0] for c in near[1]]
        seen = [j for j in seen if j < len(q) and (key_mask is None or bool(key_mask[j]))]
        rows.append(over(m, q, k, v, w, i, seen, head))
    return torch.stack(rows)


ORACLES = {"Local2d": in_grid, "BlockLocal2d": in_grid}
VARIANTS = [
    "Local2d(width=4, window=3)",
    "Local2d(width=4, window=(1, 3), num_prefix_tokens=2, scale=0.5)",
    "Local2d(width=3, window=3, dilation=(2, 1))",
    "BlockLocal2d(width=5, block_size=(1, 2), shift=(0, 1), num_prefix_tokens=1)",
    "Local2d(width=4, window=3, sinks=True)",
    "Local2d(width=4, window=3, num_prefix_tokens=1, sinks=True)",
    "BlockLocal2d(width=3, block_size=2, shift=1)",
    "BlockLocal2d(width=3, block_size=2, sinks=True)",
]
