"""Kernels of exponentials of projected tokens as operations, and the same in operations that autograd follows.

Rows of queries and of keys are (H, D, width), a bias of the logarithms (H, D), which has no gradient; states are
(B, H, D E + 2 D): ``sum_j phi(k_j) v_j^T``, ``sum_j phi(k_j)`` and the logarithms of what both are divided by.
``begins`` (chunks,): which chunks are the first of a packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu.calls import KernelSet, one_by_one
from fast_attention.gpu.maps import FLOOR, SMALLEST
from fast_attention.gpu.operations import Operations

FEW = 16  # tokens

State = tuple[Tensor, Tensor, Tensor]  # products (..., D, E), sums (..., D) and scales (..., D)


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, query_rows: Tensor,
    bias: Tensor | None, key_rows: Tensor, begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first state, and the state after all keys: the reference of ``feature_scan``."""
    if begins is not None:
        return one_by_one(plain_scan, q, k, v, key_mask, first, begins, query_rows, bias, key_rows)
    a, (b, values) = _logs(q, query_rows, bias), _logs_of_keys(k, v, key_mask, key_rows, bias)
    state, outs = _unpacked(first, b.shape[-1]) if first is not None else _nothing(b, values), []
    for at in range(0, q.shape[-2], FEW):
        few = slice(at, at + FEW)
        later = torch.ones(a[..., few, :].shape[-2], b[..., few, :].shape[-2], device=q.device).triu(1).bool()
        pairs = a[..., few, None, :] + b[..., None, few, :].masked_fill(later[..., None], -torch.inf)
        outs.append(_plainly_read(a[..., few, :], state, pairs, values[..., few, :]))
        state = _after(b[..., few, :], values[..., few, :], state)
    return torch.cat(outs, -2).to(q.dtype), _packed(*state)


def plain_sums(k: Tensor, v: Tensor, key_mask: Tensor | None, key_rows: Tensor, bias: Tensor | None) -> Tensor:
    """The state after all keys."""
    b, values = _logs_of_keys(k, v, key_mask, key_rows, bias)
    return _packed(*_after(b, values, _nothing(b, values)))


def plain_read(q: Tensor, sums: Tensor, query_rows: Tensor, bias: Tensor | None) -> Tensor:
    """Read a state for every query."""
    state = _unpacked(sums, query_rows.shape[-2])
    return _plainly_read(_logs(q, query_rows, bias), state, None, state[0]).to(q.dtype)


def _unpacked(state: Tensor, D: int) -> State:
    """A state's products, sums and scales; these without a gradient."""
    E = state.shape[-1] // D - 2
    products, sums, scales = state.split([D * E, D, D], -1)
    return products.unflatten(-1, (D, E)), sums, scales.detach()


def _packed(products: Tensor, sums: Tensor, scales: Tensor) -> Tensor:
    """(..., D E + 2 D)."""
    return torch.cat([products.flatten(-2), sums, scales], -1)


def _logs(x: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    kind = torch.promote_types(x.dtype, torch.float32)
    logs = x.to(kind) @ rows.to(kind).mT * x.shape[-1] ** -0.25
    return logs if bias is None else logs + bias.to(kind)[..., None, :]


def _logs_of_keys(
    k: Tensor, v: Tensor, key_mask: Tensor | None, rows: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    logs, values = _logs(k, rows, bias), v.to(torch.promote_types(v.dtype, torch.float32))
    logs = logs - k.to(logs.dtype).square().sum(-1, keepdim=True) * (0.5 * k.shape[-1] ** -0.5)
    if key_mask is None:
        return logs, values
    masked = ~key_mask[..., None]
    return logs.masked_fill(masked, -torch.inf), values.masked_fill(masked, 0.0)


def _nothing(logs: Tensor, values: Tensor) -> State:
    sums = torch.zeros_like(logs[..., 0, :])
    return sums.new_zeros((*sums.shape, values.shape[-1])), sums, torch.full_like(sums, FLOOR)


def _after(logs: Tensor, values: Tensor, state: State) -> State:
    scales = torch.maximum(state[2], logs.detach().amax(-2))
    features, rest = (logs - scales[..., None, :]).exp(), (state[2] - scales).exp()
    return state[0] * rest[..., None] + features.mT @ values, state[1] * rest + features.sum(-2), scales


def _plainly_read(a: Tensor, state: State, pairs: Tensor | None, values: Tensor) -> Tensor:
    """Outputs of queries with logarithms ``a``: of the state, and of ``pairs`` (..., queries, keys, D)."""
    logs = a + state[2][..., None, :]
    largest = logs.detach().amax(-1, keepdim=True)
    if pairs is not None:
        largest = torch.maximum(largest, pairs.detach().amax((-2, -1))[..., None])
    features = (logs - largest).exp()
    numerator, denominator = features @ state[0], features @ state[1][..., None]
    if pairs is not None:
        weights = (pairs - largest[..., None]).exp().sum(-1)
        numerator, denominator = numerator + weights @ values, denominator + weights.sum(-1, keepdim=True)
    nothing = denominator < SMALLEST
    return (numerator / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def _launch(*given: Any) -> Any:
    from fast_attention.gpu.launching import Launch

    return Launch.exponential(*given)


feature_scan, feature_sums, feature_read, _step = Operations.of(_launch, plain_scan, plain_sums, plain_read)


def kernel_set(query_rows: Tensor, key_rows: Tensor, bias: Tensor | None, begins: Tensor | None = None) -> KernelSet:
    """The kernels with one projection; ``begins``: of packed sequences, causal."""
    return KernelSet(
        lambda q, k, v, mask, first: feature_scan(q, k, v, mask, first, query_rows, bias, key_rows, begins),
        lambda k, v, mask: feature_sums(k, v, mask, key_rows, bias),
        lambda q, sums: feature_read(q, sums, query_rows, bias),
        lambda q, k, v, mask, state: _step(q, k, v, mask, state, query_rows, bias, key_rows),
    )
