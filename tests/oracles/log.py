"""Log attention (source 000, Eq. 7-10), score by score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def positive(m: Any, z: Tensor) -> Tensor:
    """The positive h(z) that a mechanism's ``feature_map`` names, from its definition."""
    match type(m.feature_map).__name__:
        case "PositiveSoftplus":
            return torch.log(1 + torch.exp(z)) + m.feature_map.eps
        case "PositiveExp":
            return torch.exp(z)
        case "PositiveElu":
            return torch.where(z > 0, z + 1, torch.exp(z))
        case "PositiveRelu":
            return torch.where(z > 0, z, torch.zeros_like(z)) + m.feature_map.eps
        case name:
            raise NotImplementedError(name)


def log_attention(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    length, keys = len(q), len(k)
    hq, hk = positive(m, q), positive(m, k)
    rows = []
    for i in range(length):
        seen = [
            j
            for j in range(keys)
            if (not is_causal or j <= i + keys - length) and (key_mask is None or bool(key_mask[j]))
        ]
        if not seen:
            rows.append(0 * (q[i].sum() + k.sum() + v.sum(0)))
            continue
        scores = []
        for j in seen:
            if m.score == "logdot":
                scores.append(torch.log((hq[i] * hk[j]).sum()))
                continue
            if m.normalize == "sum":
                score = torch.log(1 + hq[i]) + torch.log(1 + hk[j])
            else:
                score = torch.log(hq[i] * hk[j])
            scores.append(score.sum() if m.score == "sum" else score)
        if m.normalize == "softmax":
            weights = [torch.exp(s / m.temperature) for s in scores]
        else:
            weights = scores
        total: Any = 1.0 if m.normalize == "none" else sum(weights)
        if m.score == "logdot":
            total = total + 1e-6
        rows.append(sum(a * v[j] for a, j in zip(weights, seen, strict=True)) / total)
    return torch.stack(rows)


ORACLES = {"LogAttention": log_attention}
VARIANTS = [
    "LogAttention(feature_map=PositiveExp())",
    "LogAttention(score='sum', feature_map=PositiveElu())",
    "LogAttention(normalize='softmax')",
    "LogAttention(normalize='softmax', temperature=0.7, feature_map=PositiveExp())",
    "LogAttention(score='sum', normalize='softmax', temperature=2.0, feature_map=PositiveElu())",
    "LogAttention(normalize='none', feature_map=PositiveRelu(eps=0.01))",
    "LogAttention(score='sum', normalize='none', feature_map=PositiveSoftplus(eps=0.0))",
    "LogAttention(score='logdot', normalize='softmax')",
    "LogAttention(score='logdot', normalize='softmax', feature_map=PositiveElu())",
]
