"""The kernels of chunk sums as operations: for eager code, ``torch.compile`` and autograd.

Tensors are (B, H, n, width); states are (B, H, D E + D) in float32, ``sum_j phi(k_j) v_j^T`` in a row and
``sum_j phi(k_j)`` behind it. ``code`` and ``offset`` name the feature map (``maps.code``). Triton is imported by the
first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu import plain
from fast_attention.gpu.calls import KernelSet
from fast_attention.gpu.tensors import as_bytes, contiguous, kernels, launched, rest_like

Results = tuple[Tensor, ...]
Passed = tuple[Any, Results]  # outputs; what is kept, with what rounding took of outputs in sixteen bits


def _launch(x: Tensor, v: Tensor, code: int, offset: float) -> Any:
    from fast_attention.gpu.launching import Launch

    return Launch.of(x, v, code, offset)


@launched
def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, *, keep: bool, eps: float,
    code: int, offset: float,
) -> Passed:  # fmt: skip
    run, mask = _launch(q, v, code, offset), as_bytes(key_mask, k)
    q, k, v = contiguous(q, k, v)
    states, last = run.sums(k, v, mask, None if first is None else first.contiguous())
    out, factors, rest = run.outputs(q, k, v, mask, states, eps, is_causal=True, keep=keep)
    return (out, last), (factors, rest, states)


def scan_like(q: Tensor, k: Tensor, v: Tensor, *others: Any, keep: bool, **settings: Any) -> Passed:
    """The sizes of what a causal call returns."""
    from fast_attention.gpu.configurations import configuration

    (batch, heads, length, D), E = q.shape, v.shape[-1]
    chunk = configuration(D, E, exact=False).chunk
    wide = q.new_empty((batch, heads, D * E + D), dtype=torch.float32)
    states = wide.new_empty((batch, heads, (length + chunk - 1) // chunk, D * E + D))
    out = q.new_empty((batch, heads, length, E))
    return (out, wide), (wide.new_empty((batch, heads, length)), rest_like(out, keep), states)


@launched
def _scan_vjp(
    inputs: Any, outputs: Any, saved: Any, gradients: Any, *, eps: float, code: int, offset: float
) -> tuple[Tensor | None, ...]:
    (q, k, v, key_mask, first), (factors, rest, states), (grad, d_last) = inputs, saved, gradients
    run, mask = _launch(q, v, code, offset), as_bytes(key_mask, k)
    q, k, v, grad = contiguous(q, k, v, grad)
    weights = run.weights(outputs[0], rest, grad, factors)
    d_carry, d_first = run.sums(
        q, grad, None, d_last.contiguous(), factors=factors, weights=weights, backwards=True
    )  # fmt: skip
    dq, _ = run.of_queries(q, k, v, mask, grad, factors, weights, states, is_causal=True)
    dk, dv = run.of_keys(q, k, v, mask, grad, factors, weights, d_carry, is_causal=True)[:2]
    return dq, dk, dv, None, None if first is None else d_first


@launched
def _step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, eps: float, code: int, offset: float
) -> Results:
    from fast_attention.gpu import launching

    q, k, v = contiguous(q, k, v)
    return launching.step(q, k, v, as_bytes(key_mask, k), state.contiguous(), eps, code, offset)


@launched
def _sums(k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool, code: int, offset: float) -> Passed:
    mask = as_bytes(key_mask, k)
    return _launch(k, v, code, offset).sums(*contiguous(k, v), mask, None)[1], ()


def _sums_like(k: Tensor, v: Tensor, key_mask: Any, *, keep: bool, **settings: Any) -> Passed:
    return k.new_empty((*k.shape[:2], k.shape[-1] * v.shape[-1] + k.shape[-1]), dtype=torch.float32), ()


@launched
def _sums_vjp(
    inputs: Any, outputs: Any, saved: Any, gradients: Any, *, code: int, offset: float
) -> tuple[Tensor | None, ...]:
    (k, v, key_mask), (d_sums,) = inputs, gradients
    run, mask = _launch(k, v, code, offset), as_bytes(key_mask, k)
    k, v = contiguous(k, v)
    return *run.of_keys(k, k, v, mask, v, d_sums, d_sums, d_sums.contiguous(), is_causal=False)[:2], None


@launched
def _read(q: Tensor, sums: Tensor, *, keep: bool, eps: float, code: int, offset: float) -> Passed:
    (q,), v = contiguous(q), q.new_empty((*q.shape[:2], 1, sums.shape[-1] // q.shape[-1] - 1))
    run = _launch(q, v, code, offset)
    out, *saved = run.outputs(q, q, v, None, sums.contiguous(), eps, is_causal=False, keep=keep)
    return out, tuple(saved)


def _read_like(q: Tensor, sums: Tensor, *, keep: bool, **settings: Any) -> Passed:
    out = q.new_empty((*q.shape[:-1], sums.shape[-1] // q.shape[-1] - 1))
    return out, (sums.new_empty(q.shape[:-1]), rest_like(out, keep))


@launched
def _read_vjp(
    inputs: Any, outputs: Any, saved: Any, gradients: Any, *, eps: float, code: int, offset: float
) -> tuple[Tensor | None, ...]:
    (q, sums), (factors, rest) = inputs, saved
    q, grad = contiguous(q, gradients[0])
    run = _launch(q, grad, code, offset)
    weights = run.weights(outputs[0], rest, grad, factors)
    d_sums = run.sums(q, grad, None, None, factors=factors, weights=weights)[1]
    return run.of_queries(q, q, grad, None, grad, factors, weights, sums.contiguous(), is_causal=False)[0], d_sums


chunk_scan = kernels(plain.scan, _scan, _scan_vjp, scan_like, outputs=2)
key_sums = kernels(plain.key_sums, _sums, _sums_vjp, _sums_like)
read_sums = kernels(plain.read_sums, _read, _read_vjp, _read_like)


def kernel_set(eps: float, code: int, offset: float) -> KernelSet:
    """The kernels with one map."""
    of_map: Any = {"code": code, "offset": offset}
    return KernelSet(
        lambda q, k, v, mask, first: chunk_scan(q, k, v, mask, first, eps=eps, **of_map),
        lambda k, v, mask: key_sums(k, v, mask, **of_map),
        lambda q, sums: read_sums(q, sums, eps=eps, **of_map),
        lambda q, k, v, mask, state: _step(q, k, v, mask, state, eps, code, offset),
    )
