"""Nystrom attention (Xiong et al. 2021), agent attention (Han et al. 2023) and ABC (Peng et al. 2022), mean by mean."""

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


def agent(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """arXiv 2312.08874: agents aggregate, then broadcast."""
    assert not is_causal
    seen = visible(len(k), key_mask)
    agents = means(q, seen, m.num_agents)
    values = [average(row(x, [k[j] for j in seen]), [v[j] for j in seen]) for x in agents]
    return torch.stack([average(row(x, agents), values) for x in q])


def bounded_memory(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """arXiv 2110.02488, with phi normalised over the tokens that a query may see."""
    rows = []
    for i, query in enumerate(q):
        seen = [j for j in visible(len(k), key_mask) if not is_causal or j <= i + len(k) - len(q)]
        if not seen:
            rows.append(0 * v[0])
            continue
        phi = softmax([w.rows[head] @ k[j] for j in seen])
        keys, values = (sum(a[:, None] * x[j] for a, j in zip(phi, seen, strict=True)) for x in (k, v))
        scores = softmax(list(keys @ query / math.sqrt(len(query))))
        rows.append(scores @ values)
    return torch.stack(rows)


def lara(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """arXiv 2204.04667: draws from a mixture of Gaussians, weighed by the density that each query wants.

    With ``query_weight`` each proposal's share of the mixture is moved by how much of what all queries give its mean
    query is this query's, beside the same of other proposals; no share is below 1e-8.
    """

    def xi(x: Tensor, at: Tensor) -> Tensor:
        return ((at * x).sum() - (x * x).sum() / 2).exp()

    def normal(at: Tensor, centre: Any) -> Tensor:
        return (-((at - centre) ** 2).sum() / 2).exp()

    seen, width = visible(len(k), key_mask), q.shape[1]
    q, k = q / width**0.25, k / width**0.25
    inside = [{(r * m.num_landmarks) // len(seen) for r in range(len(seen))}] if seen else [set()]
    probes = means(q, seen, m.num_landmarks)
    centres = [a + b for a, b in zip(probes, means(k, seen, m.num_landmarks), strict=True)]
    draws = [mu + w.noise[head, c] for mu, c in zip(centres, sorted(inside[0]), strict=True)]
    rows = []
    for query in q:
        weights, features = [], []
        for at in draws:
            keys = [xi(k[j], at) for j in seen]
            features.append(sum(a * v[j] for a, j in zip(keys, seen, strict=True)) / sum(keys))
            density = normal(at, 0.0) * xi(query, at) * sum(keys)
            every = [normal(at, mu) for mu in centres]
            here = len(features) - 1
            likes = [(query * probe).sum().exp() / sum((q[j] * probe).sum().exp() for j in seen) for probe in probes]
            likes = [like.clamp(max=1.0) for like in likes]  # a masked query's may be more than all of it
            moved = m.query_weight * (likes[here] - sum(likes) / len(likes))
            weights.append(density * (every[here] / sum(every) + moved).clamp(min=1e-8) / every[here])
        rows.append(sum(a * f for a, f in zip(weights, features, strict=True)) / sum(weights))
    return torch.stack(rows)


ORACLES = {"Nystrom": nystrom, "LARA": lara, "Agent": agent, "ABC": bounded_memory}
VARIANTS = [
    "LARA(num_landmarks=5)",
    "LARA(num_landmarks=4, query_weight=1.0)",
    "ABC(num_slots=3)",
    "Agent(num_agents=5)",
    "Nystrom(num_landmarks=5)",
    "Nystrom(num_landmarks=4, num_iterations=2)",
]
