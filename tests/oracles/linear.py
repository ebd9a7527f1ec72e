"""Linear attention (Katharopoulos et al. 2020): kernels evaluated pair by pair, never as features of a state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def kernel(feature_map: Any, x: Tensor, y: Tensor) -> Tensor:
    """k(x, y) for one query and one key."""
    scaled = (x * y).sum() / math.sqrt(len(x))
    match type(feature_map).__name__:
        case "EluPlusOne":
            a, b = (torch.where(t > 0, t + 1, t.clamp(max=0).exp()) for t in (x, y))
        case "Relu":
            a, b = (torch.where(t > 0, t, 0 * t) + feature_map.offset for t in (x, y))
        case "Identity":
            a, b = x, y
        case "SoftmaxMap":
            a, b = (t.exp() / t.exp().sum() for t in (x, y))
        case "Exp":
            a, b = x.exp(), y.exp()
        case "Quadratic":
            return (1 + scaled) ** 2
        case "Taylor":
            return 1 + scaled + scaled**2 / 2
        case "DPFP":
            a, b = (torch.stack([max(r[i], 0 * r[i]) * max(r[(i + j) % len(r)], 0 * r[i])
                                 for j in range(1, feature_map.nu + 1) for i in range(len(r))])
                    for r in (torch.cat([t, -t]) for t in (x, y)))  # fmt: skip
        case name:
            raise AssertionError(f"no oracle for the feature map {name}")
    return (a * b).sum()


def visible(i: int, length: int, keys: int, is_causal: bool, key_mask: Tensor | None) -> list[int]:
    """The keys that query i sees: aligned to the bottom right."""
    last = i + keys - length if is_causal else keys - 1
    return [j for j in range(keys) if j <= last and (key_mask is None or bool(key_mask[j]))]


def average(weights: list[Tensor], values: list[Tensor], like: Tensor, denominator: Tensor | float | None) -> Tensor:
    """sum_j a_j v_j over the denominator; zeros where there is nothing to sum."""
    if not weights:
        return 0 * like
    return sum(a * v for a, v in zip(weights, values, strict=True)) / denominator  # type: ignore[return-value]


def linear(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    rows = []
    eps = 0.0 if type(m.feature_map).__name__ == "Exp" else m.eps  # logarithmic maps are normalised without it
    for i in range(len(q)):
        seen = visible(i, len(q), len(k), is_causal, key_mask)
        weights = [kernel(m.feature_map, q[i], k[j]) for j in seen]
        rows.append(average(weights, [v[j] for j in seen], v[0], sum(weights) + eps))
    return torch.stack(rows)


def decayed(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """RetNet's Eq. 5, pair by pair: every token between a key and its query, masked ones apart, fades it once.

    With a number for each channel (GLA, arXiv 2312.06635, Eq. 3) channel by channel.
    """
    logits = [w.logit[head] + (0.0 if w.rows is None else w.rows[head] @ key) for key in k]
    gates = [torch.sigmoid(x) if key_mask is None or bool(key_mask[t]) else torch.ones_like(x)
             for t, x in enumerate(logits)]  # fmt: skip
    rows = []
    for i in range(len(q)):
        seen, weights = visible(i, len(q), len(k), is_causal, key_mask), []
        for j in seen:
            decay = torch.ones_like(gates[0])
            for t in range(min(i, j) + 1, max(i, j) + 1):
                decay = decay * gates[t]
            if decay.ndim == 0:
                weights.append(decay * kernel(m.feature_map, q[i], k[j]))
            else:
                one = [kernel(m.feature_map, a[None], b[None]) for a, b in zip(q[i], k[j], strict=True)]
                weights.append((decay * torch.stack(one)).sum())
        rows.append(average(weights, [v[j] for j in seen], v[0], sum(weights) + m.eps if m.normalize else 1.0))
    return torch.stack(rows)


def t2r(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """arXiv 2103.13076: one layer with ReLU for queries and keys."""

    def phi(x: Tensor) -> Tensor:
        numbers = [row @ x + b for row, b in zip(w.rows[head], w.bias[head], strict=True)]
        return torch.stack([torch.where(t > 0, t, 0 * t) for t in numbers])

    rows = []
    for i in range(len(q)):
        seen = visible(i, len(q), len(k), is_causal, key_mask)
        weights = [phi(q[i]) @ phi(k[j]) for j in seen]
        rows.append(average(weights, [v[j] for j in seen], v[0], sum(weights) + m.eps))
    return torch.stack(rows)


def cosformer(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """arXiv 2202.08791, section 3.2: a cosine of the distance on products of ReLUs, pair by pair."""
    first, longest = len(k) - len(q) if is_causal else 0, len(w.positions)
    rows = []
    for i in range(len(q)):
        seen, weights = visible(i, len(q), len(k), is_causal, key_mask), []
        for j in seen:
            a, b = (torch.where(t > 0, t, 0 * t) for t in (q[i], k[j]))
            weights.append((a * b).sum() * math.cos(math.pi * (i + first - j) / (2 * longest)))
        rows.append(average(weights, [v[j] for j in seen], v[0], sum(weights) + m.eps))
    return torch.stack(rows)


ORACLES = {
    "LinearAttention": linear,
    "DecayedLinearAttention": decayed,
    "T2R": t2r,
    "CosFormer": cosformer,
}
VARIANTS = [
    "LinearAttention(eps=0.1)",
    "LinearAttention(feature_map=Relu(offset=0.001))",
    "LinearAttention(feature_map=Relu(), eps=0.01)",
    "LinearAttention(feature_map=SoftmaxMap())",
    "LinearAttention(feature_map=Quadratic())",
    "LinearAttention(feature_map=Taylor())",
    "LinearAttention(feature_map=Exp())",
    "LinearAttention(feature_map=DPFP())",
    "LinearAttention(feature_map=DPFP(nu=3), eps=0.01)",
    "T2R(num_features=5, eps=0.01)",
    "CosFormer(eps=0.01)",
    "DecayedLinearAttention(gate='learned')",
    "DecayedLinearAttention(gate='token')",
    "DecayedLinearAttention(feature_map=Identity(), gate='token', normalize=False)",
    "DecayedLinearAttention(feature_map=Quadratic(), eps=0.1)",
    "DecayedLinearAttention(gate='channel')",
    "DecayedLinearAttention(feature_map=Identity(), gate='channel', normalize=False)",
]
