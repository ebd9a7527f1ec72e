"""The functions that the kernels compute, in operations that autograd follows: for second derivatives and self-checks.

Chunk by chunk, so that memory grows with the length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.gpu.maps import ELU, RELU, SMALLEST

CHUNK = 128  # tokens


def scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor | None = None, *,
    eps: float, code: int, offset: float, normalized: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first state, and the state after all keys: see ``operations.chunk_scan``."""
    D, E, outs = q.shape[-1], v.shape[-1], []
    x, keys, values = features(q, code, offset), *masked(k, v, key_mask, code, offset)
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    state = values.new_zeros((*q.shape[:-2], D, E + 1)) if first is None else unpack_state(first, D, E)
    for start in range(0, q.shape[-2], CHUNK):
        at = slice(start, start + CHUNK)
        queries, chunk = x[..., at, :], keys[..., at, :]
        pairs = (queries @ chunk.mT).tril()
        if log_decay is not None:
            logs = log_decay[..., at].double().cumsum(-1)
            between = logs[..., :, None] - logs[..., None, :]
            pairs = pairs * between.masked_fill(between > 0, 0.0).exp().to(x.dtype)
            queries = queries * logs.exp().to(x.dtype)[..., None]
            chunk = chunk * (logs[..., -1:] - logs).exp().to(x.dtype)[..., None]
            decayed = logs[..., -1, None, None].exp().to(x.dtype) * state
        else:
            decayed = state
        outs.append(queries @ state + pairs @ values[..., at, :])
        state = decayed + chunk.mT @ values[..., at, :]
    sums = torch.cat(outs, -2)
    out = quotient(sums, eps) if normalized else sums[..., :-1]
    return out.to(q.dtype), pack_state(state)


def key_sums(k: Tensor, v: Tensor, key_mask: Tensor | None, *, code: int, offset: float) -> Tensor:
    """``sum_j phi(k_j) v_j^T`` in a row, and ``sum_j phi(k_j)`` behind it."""
    keys, values = masked(k, v, key_mask, code, offset)
    return pack_state(keys.mT @ torch.cat([values, torch.ones_like(values[..., :1])], -1))


def read_sums(q: Tensor, sums: Tensor, *, eps: float, code: int, offset: float) -> Tensor:
    """Read sums over all keys for every query."""
    D = q.shape[-1]
    return quotient(features(q, code, offset) @ unpack_state(sums, D, sums.shape[-1] // D - 1), eps).to(q.dtype)


def features(x: Tensor, code: int, offset: float) -> Tensor:
    """The map of every number."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.elu(x) + 1.0 if code == ELU else x.relu() + offset if code == RELU else x


def masked(k: Tensor, v: Tensor, key_mask: Tensor | None, code: int, offset: float) -> tuple[Tensor, Tensor]:
    """Features of keys, and values, zeros where hidden."""
    keys, values = features(k, code, offset), v.to(torch.promote_types(v.dtype, torch.float32))
    if key_mask is None:
        return keys, values
    masked = ~key_mask[..., None]
    return keys.masked_fill(masked, 0.0), values.masked_fill(masked, 0.0)


def quotient(sums: Tensor, eps: float) -> Tensor:
    """Numerators over the denominators that lie behind them."""
    denominator = sums[..., -1:] + eps
    nothing = denominator.abs() < SMALLEST
    return (sums[..., :-1] / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def unpack_state(state: Tensor, D: int, E: int) -> Tensor:
    """(..., D E + D) as (..., D, E + 1)."""
    return torch.cat([state[..., : D * E].unflatten(-1, (D, E)), state[..., D * E :, None]], -1)


def pack_state(state: Tensor) -> Tensor:
    """(..., D, E + 1) as (..., D E + D)."""
    return torch.cat([state[..., :-1].flatten(-2), state[..., -1]], -1)
