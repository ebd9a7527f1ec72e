"""Chosen blocks (arXiv 2502.13189 and 2509.24006): the choice of every query as a sorted list, then softmax over it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def mean(rows: list[Tensor]) -> Tensor:
    return sum(rows[1:], rows[0]) / len(rows)


def chosen(m: Any, q: Tensor, k: Tensor, i: int, seen: list[bool], is_causal: bool) -> set[int]:
    """The blocks that query i reads: the one that it stands in, and the topk - 1 best of the others."""
    b, length = m.block_size, len(q)
    mine = i // b
    members = {block: range(block * b, min((block + 1) * b, length)) for block in range(math.ceil(length / b))}
    probe = q[i]
    if not is_causal:
        counted = [t for t in members[mine] if seen[t]] or list(members[mine])
        probe = mean([q[t] for t in counted])
    scores = {}
    for block, tokens in members.items():
        shown = [k[j] for j in tokens if seen[j]]
        if block != mine and shown and (block < mine or not is_causal):
            scores[block] = (probe @ mean(shown)).item()
    best = sorted(scores, key=lambda block: -scores[block])
    return {mine, *best[: m.topk - 1]}


def selected(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    length = len(q)
    seen = [key_mask is None or bool(key_mask[j]) for j in range(length)]
    scale = 1 / math.sqrt(q.shape[1]) if m.scale is None else m.scale
    rows = []
    for i in range(length):
        blocks = chosen(m, q, k, i, seen, is_causal)
        keys = [j for j in range(length) if j // m.block_size in blocks and seen[j] and (j <= i or not is_causal)]
        if not keys:
            rows.append(torch.zeros(v.shape[1], dtype=v.dtype, device=v.device) + 0 * q[i].sum())
            continue
        scores = torch.stack([scale * (q[i] * k[j]).sum() for j in keys])
        weights = (scores - scores.max().detach()).exp()
        total = weights.sum()
        if m.sinks:  # a score more in the normaliser, whose value is zero
            total = total + (w.sinks[head] - scores.max().detach()).exp()
        rows.append(sum(weights[n] * v[j] for n, j in enumerate(keys)) / total)
    return torch.stack(rows)


ORACLES = {"Selected": selected}
VARIANTS = [
    "Selected(block_size=3, topk=2)",
    "Selected(block_size=2, topk=3, scale=1.0)",
    "Selected(sinks=True)",
    "Selected(block_size=3, topk=2, sinks=True)",
]
