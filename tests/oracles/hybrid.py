"""Hybrid attention: every pair's weight on its own, exact or estimated, then one sum; nothing is stabilised."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.biases import score
from tests.oracles.favor import damped, positive
from tests.oracles.linear import average, kernel, visible
from tests.oracles.selected import chosen


def estimate(far: Any, x: Tensor, y: Tensor, w: Any, head: int) -> Tensor:
    """phi_q(x) . phi_k(y), which stands for exp(x . y / sqrt(d)) where the far mechanism estimates softmax."""
    name, root = type(far).__name__, len(x) ** 0.25
    if name == "LinearAttention":
        return kernel(far.feature_map, x, y)
    if name == "FavorPlus":
        return positive(far, x / root, w.projection[head]) @ positive(far, y / root, w.projection[head])
    if name == "FavorPlusPlus":
        W, damping = w.projection[head], w.damping[head]
        return damped(x / root, W, damping) @ damped(y / root, W, damping)
    assert name == "LearnedFeatures", f"no oracle for {name} far away"
    a, b = x / root, y / root
    terms = (w.query[head] @ a + w.key[head] @ b).exp() + (-(w.query[head] @ a) - w.key[head] @ b).exp()
    return (-(a @ a + b @ b) / 2).exp() * terms.mean() / 2


def near(m: Any, here: int, j: int) -> bool:
    """Whether the key at position j is near the query at position ``here``, which may lie before the first key."""
    return -m.before <= j // m.block_size - math.floor(here / m.block_size) <= m.after


def hybrid(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Exact in the neighbouring blocks, or the chosen ones, and at the sink tokens, which are counted among the keys
    that may be seen at all. A bias acts on the former, unless they are sink tokens.
    """
    scale = 1 / math.sqrt(q.shape[1]) if m.near.scale is None else m.near.scale
    near_bias = getattr(m.near, "bias", None)
    biases: Any
    w, biases = w if type(near_bias).__name__ == "T5Buckets" or m.near.sinks else (w, ())
    sink, biases = (biases.sinks[head], biases.bias) if m.near.sinks else (None, biases)
    whole = [j for j in range(len(k)) if key_mask is None or bool(key_mask[j])]
    sinks = set(whole[: m.first]) | (set() if is_causal else set(whole[len(whole) - min(m.last, len(whole)) :]))
    rows = []
    known = [key_mask is None or bool(key_mask[j]) for j in range(len(k))]
    for i in range(len(q)):
        blocks = chosen(m.near, q, k, i, known, is_causal) if type(m.near).__name__ == "Selected" else None
        here, weights = i + len(k) - len(q), []
        seen = visible(i, len(q), len(k), is_causal, key_mask)
        for j in seen:
            exact = near(m.near, here, j) if blocks is None else j // m.near.block_size in blocks
            if exact or j in sinks:
                bias = None if j in sinks else near_bias
                weights.append(score(bias, biases, q[i], k[j], j - here, head=head, scale=scale).exp())
            else:
                weights.append(estimate(m.far, q[i] * scale * math.sqrt(q.shape[1]), k[j], w, head))
        total = sum(weights) if sink is None else sum(weights) + sink.exp()  # a score more, whose value is zero
        rows.append(average(weights, [v[j] for j in seen], v[0], total))
    return torch.stack(rows)


ORACLES = {"Hybrid": hybrid}
VARIANTS = [
    "Hybrid(near=BlockLocal(block_size=2), far=FavorPlus(num_features=5))",
    "Hybrid(near=BlockLocal(block_size=1, before=1, after=3), far=LearnedFeatures(num_features=5), first=2, last=2)",
    "Hybrid(near=BlockLocal(block_size=1, before=0, after=0), far=FavorPlus(num_features=6, features='hyperbolic'), "
    "first=0, last=0)",
    "Hybrid(near=BlockLocal(block_size=1), far=FavorPlusPlus(num_features=6))",
    "Hybrid(near=BlockLocal(block_size=2, bias=T5Buckets(num_buckets=8, max_distance=16)), "
    "far=FavorPlus(num_features=5))",
    "Hybrid(near=BlockLocal(block_size=3, after=0, scale=0.5), far=LinearAttention(), first=1, last=0)",
    "Hybrid(near=BlockLocal(block_size=1), far=LinearAttention(feature_map=Exp()), first=0, last=3)",
    "Hybrid(near=BlockLocal(block_size=2), far=LinearAttention(feature_map=Taylor()))",
    "Hybrid(near=Selected(block_size=3, topk=2), far=FavorPlus(num_features=5))",
    "Hybrid(near=Selected(block_size=2, topk=1, scale=0.5), far=LinearAttention(), first=0, last=2)",
    "Hybrid(near=BlockLocal(block_size=2, sinks=True), far=FavorPlus(num_features=5))",
    "Hybrid(near=Selected(block_size=3, topk=2, sinks=True), far=FavorPlus(num_features=5))",
    "Hybrid(near=BlockLocal(block_size=2, bias=ALiBi(), sinks=True), far=LearnedFeatures(num_features=5))",
    "Hybrid(near=BlockLocal(block_size=2), far=LearnedFeatures(num_features=5))",
    "Hybrid(near=BlockLocal(block_size=3, before=0, after=1), far=FavorPlus(num_features=5), first=2, last=3)",
    "Hybrid(near=BlockLocal(block_size=2, before=2, after=0, scale=0.5), far=LinearAttention(), first=0, last=0)",
    "Hybrid(near=BlockLocal(block_size=1, before=0, after=0), far=FavorPlusPlus(num_features=6), last=0)",
]
