"""Attention by length: the oracle of the one or the other mechanism for each row, by the number of keys it may see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.oracles.linear import visible


def by_length(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Rows of ``m.short`` over at most ``m.above`` visible keys, rows of ``m.long`` over more."""
    from tests.oracles import ORACLES

    settings: Any = {"head": head, "is_causal": is_causal, "key_mask": key_mask}
    short_weights, long_weights = w if len(w) else ((), ())
    short = ORACLES[type(m.short).__name__](m.short, q, k, v, short_weights, **settings)
    long = ORACLES[type(m.long).__name__](m.long, q, k, v, long_weights, **settings)
    rows = []
    for i in range(len(q)):
        number = len(visible(i, len(q), len(k), is_causal, key_mask))
        rows.append(short[i] if number <= m.above else long[i])
    return torch.stack(rows)


ORACLES = {"ByLength": by_length}
VARIANTS = [
    "ByLength(long=FavorPlus(num_features=5), above=5)",
    "ByLength(long=Local(window=4), above=8)",
    "ByLength(short=Local(window=2), long=LinearAttention(), above=4)",
    "ByLength(short=Local(window=2, dilation=(1, 3)), long=LinearAttention(), above=9)",
    "ByLength(short=LearnedFeatures(num_features=3), long=Softmax(scale=0.5), above=1)",
    "ByLength(long=Manhattan(), above=3)",
]
