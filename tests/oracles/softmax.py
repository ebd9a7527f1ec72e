"""Softmax attention, term by term."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.biases import score


def softmax(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    length, keys = len(q), len(k)
    scale = 1 / math.sqrt(q.shape[1]) if m.scale is None else m.scale
    rows = []
    for i in range(length):
        seen = [
            j
            for j in range(keys)
            if (not is_causal or j <= i + keys - length) and (key_mask is None or bool(key_mask[j]))
        ]
        if not seen:
            rows.append(torch.zeros(v.shape[1], dtype=v.dtype, device=v.device) + 0 * q[i].sum())
            continue
        here = i + keys - length
        scores = [score(m.bias, w, q[i], k[j], j - here, head=head, scale=scale) for j in seen]
        top = max(float(s.detach()) for s in scores)
        weights = [(s - top).exp() for s in scores]
        total = sum(weights)
        rows.append(sum(a / total * v[j] for a, j in zip(weights, seen, strict=True)))
    return torch.stack(rows)


ORACLES = {"Softmax": softmax}
VARIANTS = ["Softmax(scale=1.0)", "Softmax(bias=ALiBi())"]
