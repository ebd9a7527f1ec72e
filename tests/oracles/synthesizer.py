"""Synthesizers: the score of every pair of positions, then softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def dense(q: Tensor, W: Tensor, b: Tensor) -> list[Tensor]:
    """What the second layer gives for every output."""
    return [(torch.clamp(q, min=0) * W[:, j]).sum() + b[j] for j in range(len(b))]


def score(m: Any, q: Tensor, k: Tensor, w: Any, head: int, i: int, place: int, j: int) -> Tensor:
    """Of query i, which stands at ``place``, for key j."""
    kind = type(m).__name__
    if kind == "DenseSynthesizer":
        return (torch.clamp(q[i], min=0) * w.W[head, :, j]).sum() + w.b[head, j]
    if kind == "FactorizedDenseSynthesizer":
        A, B = dense(q[i], w.A.W[head], w.A.b[head]), dense(q[i], w.B.W[head], w.B.b[head])
        return [a * b for a in A for b in B][j]
    if kind == "RandomSynthesizer":
        return w.R[head, place, j] + 0 * q[i].sum()
    if kind == "FactorizedRandomSynthesizer":
        return (w.R1[head, place] * w.R2[head, j]).sum() + 0 * q[i].sum()
    if kind == "DotProduct":
        return (q[i] * k[j]).sum() / math.sqrt(q.shape[1])
    assert kind == "MixtureSynthesizer"
    shares = w.alpha[head].exp() / w.alpha[head].exp().sum()
    total = 0 * q[i].sum()
    for share, part, own in zip(shares, m.components, w.parts, strict=True):
        total = total + share * score(part, q, k, own, head, i, place, j)
    return total


def synthesizer(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    length, keys = len(q), len(k)
    rows = []
    for i in range(length):
        seen = [
            j
            for j in range(keys)
            if (not is_causal or j <= i + keys - length) and (key_mask is None or bool(key_mask[j]))
        ]
        if not seen:
            rows.append(0 * v.sum(0))
            continue
        place = i + keys - length if is_causal else i  # causal queries are the last of as many as keys
        scores = [score(m, q, k, w, head, i, place, j) for j in seen]
        top = max(float(s.detach()) for s in scores)
        weights = [(s - top).exp() for s in scores]
        rows.append(sum(a * v[j] for a, j in zip(weights, seen, strict=True)) / sum(weights))
    return torch.stack(rows)


ORACLES = dict.fromkeys(
    (
        "DenseSynthesizer",
        "FactorizedDenseSynthesizer",
        "RandomSynthesizer",
        "FactorizedRandomSynthesizer",
        "MixtureSynthesizer",
    ),
    synthesizer,
)
VARIANTS = [
    "RandomSynthesizer(trainable=False)",
    "FactorizedDenseSynthesizer(factor=4)",
    "FactorizedDenseSynthesizer(factor=1)",
    "FactorizedRandomSynthesizer(rank=3)",
    "MixtureSynthesizer(components=(RandomSynthesizer(trainable=False), FactorizedRandomSynthesizer(rank=2)))",
    "MixtureSynthesizer(components=(DenseSynthesizer(), FactorizedDenseSynthesizer(), RandomSynthesizer()))",
    "MixtureSynthesizer(components=(DotProduct(),))",
]
