"""The kernels of exponential features as operations, as ``gpu.operations`` has those of elementwise ones.

Tokens are (B, H, n, width), rows of queries and of keys (H, D, width), a bias of the logarithms (H, D); states are
(B, H, D E + 2 D) in float32: ``sum_j phi(k_j) v_j^T``, ``sum_j phi(k_j)`` and the logarithms of what both are divided
by. The bias has no gradient. ``begins`` (chunks,): which chunks are the first of a
packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu.calls import KernelSet, as_bytes, contiguous, kernels, launched, one_by_one, rest_like
from fast_attention.gpu.configurations import exponential
from fast_attention.gpu.maps import FLOOR, SMALLEST
from fast_attention.gpu.operations import Passed, Results

FEW = 16  # tokens

State = tuple[Tensor, Tensor, Tensor]  # products (..., D, E), sums (..., D) and scales (..., D)


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, query_rows: Tensor,
    key_rows: Tensor, bias: Tensor | None, begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first state, and the state after all keys: the reference of ``feature_scan``."""
    if begins is not None:
        return one_by_one(plain_scan, q, k, v, key_mask, first, begins, query_rows, key_rows, bias)
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


def _launching() -> Any:
    from fast_attention.gpu.exponential import launching

    return launching


def _launch(
    x: Tensor, query_rows: Tensor, key_rows: Tensor, bias: Tensor | None, *, trained: bool = False,
    begins: Tensor | None = None,
) -> Any:  # fmt: skip
    return _launching().Launch.of(x, query_rows, key_rows, bias, trained=trained, begins=begins)


@launched
def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, query_rows: Tensor,
    key_rows: Tensor, bias: Tensor | None, begins: Tensor | None, *, keep: bool,
) -> Passed:  # fmt: skip
    run, mask = _launch(q, query_rows, key_rows, bias, begins=begins), as_bytes(key_mask, k)
    q, k, v = contiguous(q, k, v)
    states, last = run.sums(k, v, mask, None if first is None else first.contiguous())
    out, *others = run.outputs(q, k, v, mask, states, is_causal=True, keep=keep)
    return (out, last), (*others, states)


def _scan_like(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, first: Any, query_rows: Tensor, key_rows: Tensor, bias: Any,
    begins: Any, *, keep: bool,
) -> Passed:  # fmt: skip
    (batch, heads, length, width), numbers = q.shape, key_rows.shape[-2] * (v.shape[-1] + 2)
    chunk = exponential(width, exact=q.dtype == torch.float32).forward.chunk
    last = q.new_empty((batch, heads, numbers), dtype=torch.float32)
    states = last.new_empty((batch, heads, (length + chunk - 1) // chunk, numbers))
    out, others = _read_like(q, last, query_rows, bias, keep=keep)
    return (out, last), (*others, states)


@launched
def _scan_vjp(inputs: Any, outputs: Any, saved: Any, gradients: Any) -> tuple[Tensor | None, ...]:
    q, k, v, key_mask, first, query_rows, key_rows, bias, begins = inputs
    (out, last), (*read, states), (grad, d_last) = outputs, saved, gradients
    trained, D = _trained(query_rows, key_rows), key_rows.shape[-2]
    run, mask = _launch(q, query_rows, key_rows, bias, trained=trained, begins=begins), as_bytes(key_mask, k)
    q, k, v, grad = contiguous(q, k, v, grad)
    read, d_carry = _launching().Read(out, *read), _over_scales(d_last, last, D)
    weights = run.denominators(read, grad)
    d_carry, whole = run.sums(q, grad, None, d_carry, read=read, weights=weights)
    given = q, k, v, mask, grad, read, weights
    dq, d_queries = run.of_queries(*given, states, is_causal=True)
    dk, d_keys, dv = run.of_keys(*given, d_carry, is_causal=True)
    d_first = None if first is None else _at_scales(whole, first, D)
    return dq, dk, dv, None, d_first, _of_rows(d_queries, q), _of_rows(d_keys, k), None, None


@launched
def _sums(
    k: Tensor, v: Tensor, key_mask: Tensor | None, key_rows: Tensor, bias: Tensor | None, *, keep: bool
) -> Passed:
    return _launch(k, key_rows, key_rows, bias).sums(*contiguous(k, v), as_bytes(key_mask, k), None)[1], ()


def _sums_like(k: Tensor, v: Tensor, key_mask: Any, rows: Tensor, bias: Any, *, keep: bool) -> Passed:
    return k.new_empty((*k.shape[:2], rows.shape[-2] * (v.shape[-1] + 2)), dtype=torch.float32), ()


@launched
def _sums_vjp(inputs: Any, outputs: Any, saved: Any, gradients: Any) -> tuple[Tensor | None, ...]:
    (k, v, key_mask, key_rows, bias), (sums,) = inputs, outputs
    run = _launch(k, key_rows, key_rows, bias, trained=_trained(key_rows))
    (k, v), mask = contiguous(k, v), as_bytes(key_mask, k)
    state = _over_scales(gradients[0], sums, key_rows.shape[-2])
    dk, d_keys, dv = run.of_keys(k, k, v, mask, v, _launching().Read(v, v, sums, sums), sums, state, is_causal=False)
    return dk, dv, None, _of_rows(d_keys, k), None


@launched
def _read(q: Tensor, sums: Tensor, query_rows: Tensor, bias: Tensor | None, *, keep: bool) -> Passed:
    run, (q,) = _launch(q, query_rows, query_rows, bias), contiguous(q)
    v = q.new_empty((*q.shape[:2], 1, sums.shape[-1] // query_rows.shape[-2] - 2))
    out, *others = run.outputs(q, q, v, None, sums.contiguous(), is_causal=False, keep=keep)
    return out, tuple(others)


def _read_like(q: Tensor, sums: Tensor, query_rows: Tensor, bias: Any, *, keep: bool) -> Passed:
    out = q.new_empty((*q.shape[:-1], sums.shape[-1] // query_rows.shape[-2] - 2))
    return out, (rest_like(out, keep), sums.new_empty(q.shape[:-1]), sums.new_empty(q.shape[:-1]))


@launched
def _read_vjp(inputs: Any, outputs: Any, saved: Any, gradients: Any) -> tuple[Tensor | None, ...]:
    q, sums, query_rows, bias = inputs
    run, (q, grad) = _launch(q, query_rows, query_rows, bias, trained=_trained(query_rows)), contiguous(q, gradients[0])
    read = _launching().Read(*outputs, *saved)
    weights = run.denominators(read, grad)
    whole = run.sums(q, grad, None, None, read=read, weights=weights)[1]
    dq, d_queries = run.of_queries(q, q, grad, None, grad, read, weights, sums.contiguous(), is_causal=False)
    return dq, _at_scales(whole, sums, query_rows.shape[-2]), _of_rows(d_queries, q), None


def _over_scales(gradient: Tensor, state: Tensor, D: int) -> Tensor:
    """The gradient of a state's sums as a state of its own: over the inverse of their scales."""
    return torch.cat([gradient[..., :-D], -state[..., -D:]], -1)


def _at_scales(gradient: Tensor, state: Tensor, D: int) -> Tensor:
    """The gradient of sums at their scales, from a state of sums over queries; scales have none."""
    factors = (gradient[..., -D:] + state[..., -D:]).exp()
    products = gradient[..., : -2 * D].unflatten(-1, (D, -1)) * factors[..., None]
    return torch.cat([products.flatten(-2), gradient[..., -2 * D : -D] * factors, torch.zeros_like(factors)], -1)


def _trained(*rows: Tensor) -> bool:
    return any(x.requires_grad for x in rows)


def _of_rows(logs: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of rows from that of tokens' logarithms, where it was kept."""
    return torch.einsum("bhnd,bhnw->hdw", logs, x.float() * x.shape[-1] ** -0.25) if logs.numel() else None


@launched
def _step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, query_rows: Tensor, key_rows: Tensor,
    bias: Tensor | None,
) -> Results:  # fmt: skip
    launching = _launching()
    weights = launching.Weights(query_rows, key_rows, bias, trained=False)
    q, k, v = contiguous(q, k, v)
    return launching.step(q, k, v, as_bytes(key_mask, k), state.contiguous(), weights)


feature_scan = kernels(plain_scan, _scan, _scan_vjp, _scan_like, outputs=2)
feature_sums = kernels(plain_sums, _sums, _sums_vjp, _sums_like)
feature_read = kernels(plain_read, _read, _read_vjp, _read_like)


def kernel_set(query_rows: Tensor, key_rows: Tensor, bias: Tensor | None, begins: Tensor | None = None) -> KernelSet:
    """The kernels with one projection; ``begins``: of packed sequences, causal."""
    return KernelSet(
        lambda q, k, v, mask, first: feature_scan(q, k, v, mask, first, query_rows, key_rows, bias, begins),
        lambda k, v, mask: feature_sums(k, v, mask, key_rows, bias),
        lambda q, sums: feature_read(q, sums, query_rows, bias),
        lambda q, k, v, mask, state: _step(q, k, v, mask, state, query_rows, key_rows, bias),
    )
