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

from fast_attention.gpu.calls import KernelSet
from fast_attention.gpu.configurations import exponential
from fast_attention.gpu.exponential import plain
from fast_attention.gpu.operations import Passed, Results
from fast_attention.gpu.tensors import as_bytes, contiguous, kernels, launched, rest_like


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


feature_scan = kernels(plain.scan, _scan, _scan_vjp, _scan_like, outputs=2)
feature_sums = kernels(plain.key_sums, _sums, _sums_vjp, _sums_like)
feature_read = kernels(plain.read_sums, _read, _read_vjp, _read_like)


def kernel_set(query_rows: Tensor, key_rows: Tensor, bias: Tensor | None, begins: Tensor | None = None) -> KernelSet:
    """The kernels with one projection; ``begins``: of packed sequences, causal."""
    return KernelSet(
        lambda q, k, v, mask, first: feature_scan(q, k, v, mask, first, query_rows, key_rows, bias, begins),
        lambda k, v, mask: feature_sums(k, v, mask, key_rows, bias),
        lambda q, sums: feature_read(q, sums, query_rows, bias),
        lambda q, k, v, mask, state: _step(q, k, v, mask, state, query_rows, key_rows, bias),
    )
