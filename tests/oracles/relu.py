"""Attention weights by relu, term by term."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def relu(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    length, keys = len(q), len(k)
    scale = 1 / math.sqrt(q.shape[1]) if m.scale is None else m.scale
    rows = []
    for i in range(length):
        row, total, seen = 0 * q[i].sum() + torch.zeros_like(v[0]), 0 * q[i].sum(), 0
        for j in range(keys):
            if is_causal and j > i + keys - length:
                continue
            if key_mask is not None and not bool(key_mask[j]):
                continue
            seen += 1
            score = scale * (q[i] * k[j]).sum()
            if float(score.detach()) > 0:
                weight = score**m.power
                row, total = row + weight * v[j], total + weight
        if m.norm == "sum":
            row = row / (total + m.eps) if float(total.detach()) > 0 else row
        elif m.norm == "length":
            row = row / max(seen, 1)
        rows.append(row)
    return torch.stack(rows)


ORACLES = {"ReLUAttention": relu}
VARIANTS = [
    "ReLUAttention(norm='length')",
    "ReLUAttention(norm='none', scale=0.5)",
    "ReLUAttention(power=2)",
    "ReLUAttention(norm='length', power=2)",
    "ReLUAttention(eps=0.0)",
    "ReLUAttention(eps=0.5)",
]
