"""Attention adapted: the oracle of the mechanism, of tokens with their low-rank deltas, number by number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def delta(x: Tensor, factors: Any, head: int) -> Tensor:
    """``x_i + sum_r sum_j x_j D_jr U_ri``."""
    if factors is None:
        return x
    down, up = factors[0][head], factors[1][head]
    rows = []
    for token in x:
        inner = [sum(token[j] * down[j, r] for j in range(len(token))) for r in range(down.shape[1])]
        rows.append(
            torch.stack([token[i] + sum(inner[r] * up[r, i] for r in range(len(inner))) for i in range(len(token))])
        )
    return torch.stack(rows)


def adapted(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """The mechanism of queries, keys and values that were moved."""
    from tests.oracles import ORACLES

    settings: Any = {"head": head, "is_causal": is_causal, "key_mask": key_mask}
    q, k, v = (delta(x, factors, head) for x, factors in zip((q, k, v), w[:3], strict=True))
    return ORACLES[type(m.mechanism).__name__](m.mechanism, q, k, v, w[3], **settings)


ORACLES = {"Adapted": adapted}
VARIANTS = [
    "Adapted(mechanism=LearnedFeatures(num_features=5), rank=2)",
    "Adapted(mechanism=Softmax(), rank=1, adapts='qk')",
    "Adapted(mechanism=Manhattan(), rank=3, adapts='kv')",
    "Adapted(mechanism=Hybrid(near=BlockLocal(block_size=2), far=LearnedFeatures(num_features=5)), rank=2)",
    "Adapted(mechanism=FavorPlus(num_features=5), adapts='v')",
    "ByLength(long=Adapted(mechanism=Local(window=3), rank=2), above=4)",
]
