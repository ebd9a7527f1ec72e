"""Attention-free transformers (Zhai et al. 2021, Eq. 2-5): one softmax over positions for every channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _aft(q: Tensor, k: Tensor, v: Tensor, bias: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
    """``bias(t, j)``: what is added to key j for the query at t, or None where it may not be seen."""
    length, keys = len(q), len(k)
    rows = []
    for i in range(length):
        t = i + keys - length if is_causal else i
        seen, scores = [], []
        for j in range(keys):
            if (is_causal and j > t) or (key_mask is not None and not bool(key_mask[j])):
                continue
            if bias(t, j) is None:
                continue
            seen.append(j)
            scores.append(k[j] + bias(t, j))
        if not seen:
            rows.append(0 * (q[i] + k.sum(0) + v.sum(0)))
            continue
        top = torch.stack(scores).detach().max(0).values
        weights = [torch.exp(s - top) for s in scores]
        pooled = sum(a * v[j] for a, j in zip(weights, seen, strict=True)) / sum(weights)
        rows.append(pooled / (1 + torch.exp(-q[i])))
    return torch.stack(rows)


def full(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    def bias(t: int, j: int) -> Tensor:
        return w.bias[t, j] if m.rank is None else (w.rows[t] * w.columns[j]).sum()

    return _aft(q, k, v, bias, is_causal=is_causal, key_mask=key_mask)


def simple(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    return _aft(q, k, v, lambda t, j: 0.0, is_causal=is_causal, key_mask=key_mask)


def local(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    def bias(t: int, j: int) -> Any:
        if abs(t - j) < m.window:
            return w.band[t, j - t + m.window - 1]
        return None if m.strict else 0.0

    return _aft(q, k, v, bias, is_causal=is_causal, key_mask=key_mask)


def conv(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    taps, reach = w.kernel[head], m.kernel_size // 2
    mean = taps.sum() / len(taps)
    std = torch.sqrt(((taps - mean) ** 2).sum() / len(taps))
    taps = w.gain[head] * (taps - mean) / std + w.shift[head]

    def bias(t: int, j: int) -> Any:
        return taps[j - t + reach] if abs(t - j) <= reach else 0.0

    return _aft(q, k, v, bias, is_causal=is_causal, key_mask=key_mask)


def wkv(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """arXiv 2305.13048, Eq. 16, with the gate; distances count visible tokens, as if the others were not there."""
    assert is_causal
    decay, bonus = torch.exp(w.log_decay[head]), w.bonus[head]
    seen = [key_mask is None or bool(key_mask[j]) for j in range(len(k))]

    def bias(t: int, j: int) -> Tensor:
        return bonus if j == t else -sum(seen[j + 1 : t]) * decay

    return _aft(q, k, v, bias, is_causal=True, key_mask=key_mask)


ORACLES = {"AFTFull": full, "AFTSimple": simple, "AFTLocal": local, "AFTConv": conv, "WKV": wkv}
VARIANTS = [
    "AFTFull(rank=3)",
    "AFTLocal(window=1)",
    "AFTLocal(window=3)",
    "AFTLocal(window=4)",
    "AFTLocal(window=2, strict=True)",
    "AFTLocal(window=3, strict=True)",
    "AFTLocal(window=6, strict=True)",
    "AFTConv(kernel_size=3)",
    "AFTConv(kernel_size=7)",
]
