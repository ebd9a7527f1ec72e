"""Kernels of elementwise features as operations, and the same functions in operations that autograd follows.

States are (B, H, D E + D), ``sum_j phi(k_j) v_j^T`` in a row and ``sum_j phi(k_j)`` behind it. ``code`` and ``offset``
name the feature map (``maps``). ``log_decay`` (B, H, n) in float32 are the logarithms, none above zero, by which every
token multiplies what was before it; causal calls alone have them. Not ``normalized``, outputs are numerators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.gpu.calls import KernelSet
from fast_attention.gpu.maps import ELU, RELU, SMALLEST
from fast_attention.gpu.operations import Operations

CHUNK = 128  # tokens


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor | None = None, *,
    eps: float, code: int, offset: float, normalized: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first state, and the state after all keys: the reference of ``chunk_scan``."""
    D, E, outs = q.shape[-1], v.shape[-1], []
    x, keys, values = _features(q, code, offset), *_masked(k, v, key_mask, code, offset)
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    state = values.new_zeros((*q.shape[:-2], D, E + 1)) if first is None else _unpacked(first, D, E)
    for start in range(0, q.shape[-2], CHUNK):
        at = slice(start, start + CHUNK)
        queries, chunk = x[..., at, :], keys[..., at, :]
        pairs, logs = (queries @ chunk.mT).tril(), None
        if log_decay is not None:
            logs = log_decay[..., at].double().cumsum(-1)
            between = logs[..., :, None] - logs[..., None, :]
            pairs = pairs * between.masked_fill(between > 0, 0.0).exp().to(x.dtype)
            queries = queries * logs.exp().to(x.dtype)[..., None]
            chunk = chunk * (logs[..., -1:] - logs).exp().to(x.dtype)[..., None]
        outs.append(queries @ state + pairs @ values[..., at, :])
        state = state if logs is None else logs[..., -1, None, None].exp().to(x.dtype) * state
        state = state + chunk.mT @ values[..., at, :]
    sums = torch.cat(outs, -2)
    out = _quotient(sums, eps) if normalized else sums[..., :-1]
    return out.to(q.dtype), _packed(state)


def plain_sums(k: Tensor, v: Tensor, key_mask: Tensor | None, *, code: int, offset: float) -> Tensor:
    """``sum_j phi(k_j) v_j^T`` in a row, and ``sum_j phi(k_j)`` behind it."""
    keys, values = _masked(k, v, key_mask, code, offset)
    return _packed(keys.mT @ torch.cat([values, torch.ones_like(values[..., :1])], -1))


def plain_read(q: Tensor, sums: Tensor, *, eps: float, code: int, offset: float) -> Tensor:
    """Read sums over all keys for every query."""
    D = q.shape[-1]
    return _quotient(_features(q, code, offset) @ _unpacked(sums, D, sums.shape[-1] // D - 1), eps).to(q.dtype)


def _features(x: Tensor, code: int, offset: float) -> Tensor:
    """The map of every number."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.elu(x) + 1.0 if code == ELU else x.relu() + offset if code == RELU else x


def _masked(k: Tensor, v: Tensor, key_mask: Tensor | None, code: int, offset: float) -> tuple[Tensor, Tensor]:
    """Features of keys, and values, zeros where hidden."""
    keys, values = _features(k, code, offset), v.to(torch.promote_types(v.dtype, torch.float32))
    if key_mask is None:
        return keys, values
    masked = ~key_mask[..., None]
    return keys.masked_fill(masked, 0.0), values.masked_fill(masked, 0.0)


def _quotient(sums: Tensor, eps: float) -> Tensor:
    """Numerators over the denominators that lie behind them."""
    denominator = sums[..., -1:] + eps
    nothing = denominator.abs() < SMALLEST
    return (sums[..., :-1] / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def _unpacked(state: Tensor, D: int, E: int) -> Tensor:
    """(..., D E + D) as (..., D, E + 1)."""
    return torch.cat([state[..., : D * E].unflatten(-1, (D, E)), state[..., D * E :, None]], -1)


def _packed(state: Tensor) -> Tensor:
    """(..., D, E + 1) as (..., D E + D)."""
    return torch.cat([state[..., :-1].flatten(-2), state[..., -1]], -1)


def _launch(*given: Any, **settings: Any) -> Any:
    from fast_attention.gpu.launching import Launch

    return Launch.elementwise(*given, **settings)


chunk_scan, key_sums, read_sums, _step = Operations.of(_launch, plain_scan, plain_sums, plain_read)


def kernel_set(
    eps: float, code: int, offset: float, log_decay: Tensor | None = None, *, normalized: bool = True
) -> KernelSet:
    """The kernels with one map, of tokens that decay so; these are causal only."""
    of_map: Any = {"code": code, "offset": offset}
    settings: Any = {"eps": eps, "normalized": normalized, **of_map}

    def decays(x: Tensor) -> Tensor | None:
        return None if log_decay is None else log_decay[..., : x.shape[-2]]

    return KernelSet(
        lambda q, k, v, mask, first: chunk_scan(q, k, v, mask, first, decays(q), **settings),
        None if log_decay is not None else lambda k, v, mask: key_sums(k, v, mask, **of_map),
        None if log_decay is not None else lambda q, sums: read_sums(q, sums, eps=eps, **of_map),
        lambda q, k, v, mask, state: _step(q, k, v, mask, state, decays(q), **settings),
    )
