"""The functions that the kernels compute, in operations that autograd follows: for second derivatives and self-checks.

Chunk by chunk, so that memory grows with the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.gpu.calls import KernelSet
from fast_attention.gpu.maps import ELU, RELU
from fast_attention.gpu.maps import SMALLEST as SMALLEST

CHUNK = 128  # tokens


def scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, *, eps: float, code: int,
    offset: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first state, and the sums over all keys with it: see ``operations.chunk_scan``."""
    length, D, E = q.shape[-2], q.shape[-1], v.shape[-1]
    x, keys, values = features(q, code, offset), *masked(k, v, key_mask, code, offset)
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    x, keys, values = (F.pad(each, (0, 0, 0, -length % CHUNK)).unflatten(-2, (-1, CHUNK)) for each in (x, keys, values))
    states = keys.mT @ values
    last = states.sum(-3) if first is None else states.sum(-3) + unpack_state(first, D, E)
    before = F.pad(states.cumsum(-3)[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    before = before if first is None else before + unpack_state(first, D, E)[..., None, :, :]
    sums = x @ before + (x @ keys.mT).tril() @ values
    return quotient(sums.flatten(-3, -2)[..., :length, :], eps).to(q.dtype), pack_state(last)


def key_sums(k: Tensor, v: Tensor, key_mask: Tensor | None, *, code: int, offset: float) -> Tensor:
    """``sum_j phi(k_j) v_j^T`` in a row, and ``sum_j phi(k_j)`` behind it."""
    keys, values = masked(k, v, key_mask, code, offset)
    return pack_state(keys.mT @ torch.cat([values, torch.ones_like(values[..., :1])], -1))


def read_sums(q: Tensor, sums: Tensor, *, eps: float, code: int, offset: float) -> Tensor:
    """Read sums over all keys for every query."""
    D = q.shape[-1]
    return quotient(features(q, code, offset) @ unpack_state(sums, D, sums.shape[-1] // D - 1), eps).to(q.dtype)


def kernel_set(eps: float, code: int, offset: float) -> KernelSet:
    """Plain functions with one map."""
    of_map: Any = {"code": code, "offset": offset}
    return KernelSet(
        lambda q, k, v, mask, first: scan(q, k, v, mask, first, eps=eps, **of_map),
        lambda k, v, mask: key_sums(k, v, mask, **of_map),
        lambda q, sums: read_sums(q, sums, eps=eps, **of_map),
        lambda q, k, v, mask, state: scan(q, k, v, mask, state, eps=eps, **of_map),
    )


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
