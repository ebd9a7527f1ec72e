"""FNet, gMLP and MLP-Mixer, token by token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def fnet(m: Any, x: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
    """The real part of the double sum over tokens and channels."""
    assert not is_causal
    assert key_mask is None
    length, width = x.shape
    tokens = torch.arange(length, dtype=x.dtype, device=x.device)[:, None] / length
    channels = torch.arange(width, dtype=x.dtype, device=x.device)[None, :] / width
    scale = 1 / math.sqrt(length * width) if m.norm == "ortho" else 1
    rows = []
    for i in range(length):
        waves = [torch.cos(2 * math.pi * (i * tokens + c * channels)) for c in range(width)]
        rows.append(torch.stack([scale * (wave * x).sum() for wave in waves]))
    return torch.stack(rows)


def tiny_attention(x: Tensor, w: Any, seen: list[int]) -> Tensor:
    """The output of the last row of x."""
    a = w.QKV.shape[1] // 3
    q, k, v = x[-1] @ w.QKV[:, :a], x @ w.QKV[:, a : 2 * a], x @ w.QKV[:, 2 * a :]
    if not seen:
        return 0 * x[-1].sum() + torch.zeros_like(w.O[0])
    weights = torch.stack([(q * k[j]).sum() / math.sqrt(a) for j in seen]).softmax(0)
    return sum(weight * v[j] for weight, j in zip(weights, seen, strict=True)) @ w.O


def gmlp(m: Any, x: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
    length, half, limit = len(x), len(w.gain), len(w.b)
    seen = [j for j in range(length) if key_mask is None or bool(key_mask[j])]
    x = torch.stack([x[i] if i in seen else torch.zeros_like(x[i]) for i in range(length)])
    kept, gates = [], []
    for i in range(length):
        z = gelu(x[i] @ w.U + w.U_bias)
        z1, z2 = z[:half], z[half:]
        mean = z2.sum() / half
        variance = ((z2 - mean) ** 2).sum() / half
        kept.append(z1)
        gates.append((z2 - mean) / torch.sqrt(variance + 1e-5) * w.gain + w.shift)
    rows = []
    for i in range(length):
        past = [j for j in seen if not is_causal or j <= i]
        gate = w.b[i] + 0 * x.sum() + torch.zeros_like(gates[0])
        for j in past:
            gate = gate + (w.W[j - i + limit - 1] if m.toeplitz else w.W[i, j]) * gates[j]
        if m.attention_dim:
            gate = gate + tiny_attention(torch.cat([x, x[i : i + 1]]), w.tiny, past)
        rows.append((kept[i] * gate) @ w.V + w.V_bias)
    return torch.stack(rows)


def mlp_mixer(m: Any, x: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
    length = len(x)
    seen = [j for j in range(length) if key_mask is None or bool(key_mask[j])]
    hidden = []
    for h in range(len(w.b1)):
        total = w.b1[h] + 0 * x.sum(0)
        for j in seen:
            if not is_causal or j <= h:
                total = total + w.W1[h, j] * x[j]
        hidden.append(gelu(total))
    rows = []
    for i in range(length):
        used = range(min(i + 1, len(hidden))) if is_causal else range(len(hidden))
        rows.append(w.b2[i] + sum(w.W2[i, h] * hidden[h] for h in used))
    return torch.stack(rows)


ORACLES = {"FNet": fnet, "GMLP": gmlp, "MLPMixer": mlp_mixer}
VARIANTS = [
    "FNet(norm='ortho')",
    "GMLP(expansion=2, attention_dim=5)",
    "GMLP(expansion=1, toeplitz=True)",
    "GMLP(expansion=3, attention_dim=4, toeplitz=True)",
    "MLPMixer(token_hidden=5)",
    "MLPMixer(token_hidden=None)",
]
