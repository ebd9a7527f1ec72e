"""Linformer: slot by slot, then softmax over slots."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def pooled(m: Any, k: Tensor, v: Tensor, seen: list[int]) -> list[tuple[Tensor, Tensor, int]]:
    """Key, value and size of every slot that holds a token: the r-th of n visible tokens goes to floor(r rank / n)."""
    slots = []
    for s in range(m.rank):
        inside = [j for r, j in enumerate(seen) if (r * m.rank) // len(seen) == s]
        if not inside:
            continue
        tokens = [torch.stack([x[j] for j in inside]) for x in (k, v)]
        if type(m.projection).__name__ == "MeanPool":
            key, value = (sum(x) / len(inside) for x in tokens)
        else:
            key, value = (torch.stack([max(x[:, c]) for c in range(x.shape[1])]) for x in tokens)
        slots.append((key, value, len(inside)))
    return slots


def convolved(k: Tensor, v: Tensor, E: Tensor, F: Tensor, seen: list[int]) -> list[tuple[Tensor, Tensor, int]]:
    stride, slots = len(E), []
    for start in range(0, len(k), stride):
        inside = [j for j in seen if start <= j < start + stride]
        if inside:
            slots.append((sum(E[j - start] * k[j] for j in inside), sum(F[j - start] * v[j] for j in inside), 1))
    return slots


def projected(k: Tensor, v: Tensor, E: Tensor, F: Tensor, seen: list[int]) -> list[tuple[Tensor, Tensor, int]]:
    return [((e[seen, None] * k[seen]).sum(0), (f[seen, None] * v[seen]).sum(0), 1) for e, f in zip(E, F, strict=True)]


def linformer(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    assert not is_causal
    seen = [j for j in range(len(k)) if key_mask is None or bool(key_mask[j])]
    kind = type(m.projection).__name__
    if kind == "LearnedProjection":
        E, F = w.E, w.E if m.projection.sharing in ("key-value", "layerwise") else w.F
        if m.projection.sharing == "none":
            E, F = E[head], F[head]
        slots = projected(k, v, E, F, seen)
    elif kind == "Convolution":
        slots = convolved(k, v, w.E[head], w.F[head], seen)
    else:
        slots = pooled(m, k, v, seen)
    rows = []
    for i in range(len(q)):
        scores = torch.stack([(q[i] * key).sum() / math.sqrt(q.shape[1]) for key, _, _ in slots])
        weights = (scores - scores.detach().max()).exp()
        sizes = torch.tensor([size for _, _, size in slots], dtype=q.dtype, device=q.device)
        total = (weights * sizes).sum()
        rows.append(sum(a * n / total * value for a, n, (_, value, _) in zip(weights, sizes, slots, strict=True)))
    return torch.stack(rows)


ORACLES = {"Linformer": linformer}
VARIANTS = [
    "Linformer(rank=5)",
    "Linformer(rank=5, projection=LearnedProjection(sharing='headwise'))",
    "Linformer(rank=5, projection=LearnedProjection(sharing='key-value'))",
    "Linformer(rank=5, projection=LearnedProjection(sharing='layerwise'))",
    "Linformer(rank=5, projection=MeanPool())",
    "Linformer(projection=MeanPool())",
    "Linformer(rank=5, projection=MaxPool())",
    "Linformer(rank=7, projection=Convolution())",
]
