"""Sinkhorn attention and SortCut: block by block, the soft permutation by plain division of rows and columns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Place = tuple[Tensor, Tensor, Any]


def balanced(scores: list[list[Any]], rounds: int) -> list[list[Any]]:
    """Rows and columns of exp(scores) divided by their sums in turn; an entry of None takes no part."""
    S = [[None if x is None else x.exp() for x in row] for row in scores]
    for step in range(max(2 * rounds, 1)):
        if step % 2 == 0:
            S = [[None if x is None else x / sum(y for y in row if y is not None) for x in row] for row in S]
        else:
            sums = [sum(y for y in column if y is not None) for column in zip(*S, strict=True)]
            S = [[None if x is None else x / total for x, total in zip(row, sums, strict=True)] for row in S]
    return S


def sorted_rows(m: Any, k: Tensor, P: Tensor, blocks: list[list[int]], is_causal: bool) -> dict[int, dict[int, Any]]:
    """Row i -> {block j: weight}, for blocks that hold a visible token."""
    live = [i for i, block in enumerate(blocks) if block]
    seen = [j for block in blocks for j in block]
    rows = {}
    if is_causal:
        for i in range(len(blocks)):
            past = [j for j in seen if j <= i * m.block_size]
            x = sum((k[j] for j in past), torch.zeros_like(k[0])) / max(len(past), 1)
            earlier = [j for j in live if j < i]
            weights = balanced([[(x * P[:, j]).sum() / m.temperature for j in earlier]], 0)[0] if earlier else []
            rows[i] = dict(zip(earlier, weights, strict=True))
        return rows
    x = {i: sum(k[j] for j in blocks[i]) for i in live}
    S = balanced([[(x[i] * P[:, j]).sum() / m.temperature for j in live] for i in live], m.num_iterations)
    return {i: dict(zip(live, row, strict=True)) for i, row in zip(live, S, strict=True)}


def sorted_places(m: Any, k: Tensor, v: Tensor, row: dict[int, Any], seen: set[int]) -> list[Place]:
    """Keys, values and shares of the places of one sorted block."""
    places = []
    for t in range(m.block_size):
        parts = [(weight, j * m.block_size + t) for j, weight in row.items() if j * m.block_size + t in seen]
        if parts:
            share = sum(weight for weight, _ in parts) / sum(row.values())
            key, value = (sum(weight * x[j] for weight, j in parts) / share for x in (k, v))
            places.append((key, value, share))
    return places


def attend(q: Tensor, places: list[Place], v: Tensor) -> Tensor:
    if not places:
        return 0 * q.sum() + torch.zeros_like(v[0])
    scores = [(q * key).sum() / math.sqrt(len(q)) for key, _, _ in places]
    top = max(float(score.detach()) for score in scores)
    weights = [share * (score - top).exp() for score, (_, _, share) in zip(scores, places, strict=True)]
    out = sum((weight * value for weight, (_, value, _) in zip(weights, places, strict=True)), torch.zeros_like(v[0]))
    return out / sum(weights)


def cut(m: Any, keys: int, key_mask: Tensor | None) -> list[list[int]]:
    seen = [j for j in range(keys) if key_mask is None or bool(key_mask[j])]
    return [[j for j in seen if j // m.block_size == i] for i in range(math.ceil(keys / m.block_size))]


def sinkhorn(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    blocks = cut(m, len(k), key_mask)
    seen = {j for block in blocks for j in block}
    rows = sorted_rows(m, k, w.P[head], blocks, is_causal)
    places = {i: sorted_places(m, k, v, row, seen) for i, row in rows.items()}
    out = []
    for i in range(len(q)):
        block = i // m.block_size
        own = [(k[j], v[j], 1.0) for j in blocks[block] if not is_causal or j <= i]
        out.append(attend(q[i], places.get(block, []) + own, v))
    return torch.stack(out)


def sortcut(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    assert not is_causal
    blocks = cut(m, len(k), key_mask)
    seen = {j for block in blocks for j in block}
    rows = sorted_rows(m, k, w.P[head], blocks, False)
    places = [place for i in sorted(rows)[: m.budget] for place in sorted_places(m, k, v, rows[i], seen)]
    return torch.stack([attend(q[i], places, v) for i in range(len(q))])


ORACLES = {"Sinkhorn": sinkhorn, "SortCut": sortcut}
VARIANTS = [
    "Sinkhorn(block_size=4)",
    "Sinkhorn(block_size=3, num_iterations=0, temperature=0.5)",
    "Sinkhorn(block_size=1, num_iterations=2)",
    "SortCut(block_size=4, budget=1)",
    "SortCut(block_size=3, num_iterations=0, temperature=0.5)",
    "SortCut(block_size=2, num_iterations=3, budget=9)",
]
