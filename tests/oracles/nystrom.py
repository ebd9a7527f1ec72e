"""Nystrom attention (Xiong et al. 2021), mean by mean."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def softmax(scores: list[Tensor]) -> Tensor:
    """Weights that sum to one, over the first axis."""
    row = torch.stack(scores)
    weights = (row - row.detach().amax(0)).exp()
    return weights / weights.sum(0)


def row(query: Tensor, keys: list[Tensor]) -> Tensor:
    return softmax([(query * key).sum() / math.sqrt(len(query)) for key in keys])


def average(weights: Tensor, values: list[Tensor]) -> Tensor:
    return sum((a * value for a, value in zip(weights, values, strict=True)), 0 * values[0])


def means(x: Tensor, seen: list[int], number: int) -> list[Tensor]:
    """The means of the segments that hold a token: of n visible ones, the r-th is in number floor(r number / n)."""
    pooled = []
    for s in range(number):
        inside = [x[j] for r, j in enumerate(seen) if (r * number) // len(seen) == s]
        if inside:
            pooled.append(sum(inside) / len(inside))
    return pooled


def visible(keys: int, key_mask: Tensor | None) -> list[int]:
    return [j for j in range(keys) if key_mask is None or bool(key_mask[j])]


def pseudo_inverse(A: Tensor, iterations: int) -> Tensor:
    """arXiv 2102.03902, whose first Z is A^T over its largest sum of a column and of a row."""
    I = torch.eye(len(A), dtype=A.dtype, device=A.device)
    column, line = max(A[:, j].abs().sum() for j in range(len(A))), max(A[i].abs().sum() for i in range(len(A)))
    Z = A.mT / (column * line)
    for _ in range(iterations):
        Z = Z @ (13 * I - A @ Z @ (15 * I - A @ Z @ (7 * I - A @ Z))) / 4
    return Z


def nystrom(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    assert not is_causal
    seen = visible(len(k), key_mask)
    keys, values = [k[j] for j in seen], [v[j] for j in seen]
    if len(seen) <= m.num_landmarks:
        return torch.stack([average(row(x, keys), values) for x in q])
    queries_, keys_ = means(q, seen, m.num_landmarks), means(k, seen, m.num_landmarks)
    A = torch.stack([row(x, keys_) for x in queries_])
    BV = torch.stack([average(row(x, keys), values) for x in queries_])
    ZBV = pseudo_inverse(A, m.num_iterations) @ BV
    return torch.stack([average(row(x, keys_), list(ZBV)) for x in q])


ORACLES = {"Nystrom": nystrom}
VARIANTS = [
    "Nystrom(num_landmarks=5)",
    "Nystrom(num_landmarks=4, num_iterations=2)",
]
