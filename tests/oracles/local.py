"""Local attention: which keys stand near enough, then softmax over them, term by term."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.biases import score


def _over(m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, i: int, seen: list[int], head: int) -> Tensor:
    if not seen:
        return torch.zeros(v.shape[1], dtype=v.dtype, device=v.device) + 0 * q[i].sum()
    scale = 1 / math.sqrt(q.shape[1]) if m.scale is None else m.scale
    here = i + len(k) - len(q)
    scores = [score(m.bias, w, q[i], k[j], j - here, head=head, scale=scale) for j in seen]
    top = max(float(s.detach()) for s in scores)
    weights = [(s - top).exp() for s in scores]
    return sum((a * v[j] for a, j in zip(weights, seen, strict=True)), torch.zeros_like(v[0])) / sum(weights)


def local(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """FlashAttention's window (left, right), both ends included, aligned to the bottom right; every so many keys of it.

    The gaps are Longformer's dilation (arXiv 2004.05150, section 3.1).
    """
    left, right = m.window if isinstance(m.window, tuple) else (m.window, m.window)
    apart = m.dilation[head % len(m.dilation)] if isinstance(m.dilation, tuple) else m.dilation
    rows = []
    for i in range(len(q)):
        here = i + len(k) - len(q)
        seen = []
        for j in range(len(k)):
            steps, between = divmod(j - here, apart)
            near = between == 0 and -left <= steps <= right
            if near and not (is_causal and j > here) and (key_mask is None or bool(key_mask[j])):
                seen.append(j)
        rows.append(_over(m, q, k, v, w, i, seen, head))
    return torch.stack(rows)


def block_local(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Block i attends to itself, ``before`` blocks before it and ``after`` blocks after it."""
    rows = []
    for i in range(len(q)):
        here = i + len(k) - len(q)
        block = math.floor(here / m.block_size)
        seen = []
        for j in range(len(k)):
            other = j // m.block_size
            near = block - m.before <= other <= block + m.after
            if near and not (is_causal and j > here) and (key_mask is None or bool(key_mask[j])):
                seen.append(j)
        rows.append(_over(m, q, k, v, w, i, seen, head))
    return torch.stack(rows)


ORACLES = {"Local": local, "BlockLocal": block_local}
VARIANTS = [
    "Local(window=3)",
    "Local(window=(2, 1))",
    "Local(window=(1, 4), scale=0.5)",
    "Local(window=2, dilation=3)",
    "Local(window=(1, 2), scale=0.5, dilation=2)",
    "Local(window=2, dilation=(1, 3))",
    "Local(window=3, bias=T5Buckets(num_buckets=8, max_distance=16))",
    "Local(window=2, bias=TransformerXL(width=6))",
    "BlockLocal(block_size=4)",
    "BlockLocal(block_size=3, before=2, after=0)",
    "BlockLocal(block_size=4, before=0, after=2, scale=1.0)",
    "BlockLocal(block_size=5, before=0, after=0)",
    "BlockLocal(block_size=3, bias=ALiBi())",
]
