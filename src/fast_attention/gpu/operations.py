"""The kernels of chunk sums as operations: for eager code, ``torch.compile`` and autograd.

Tensors are (B, H, n, width); states are (B, H, D E + D) in float32, ``sum_j phi(k_j) v_j^T`` in a row and
``sum_j phi(k_j)`` behind it. ``code`` and ``offset`` name the feature map (``maps``). ``log_decay`` (B, H, n) in
float32 are the logarithms, none above zero, by which every token multiplies what was before it; causal calls alone have
them. Not ``normalized``, outputs are numerators. Triton is imported by the first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu import plain
from fast_attention.gpu.calls import KernelSet
from fast_attention.gpu.configurations import configuration
from fast_attention.gpu.tensors import as_bytes, contiguous, kernels, launched, rest_like

Results = tuple[Tensor, ...]
Passed = tuple[Any, Results]  # outputs; what is kept, with what rounding took of outputs in sixteen bits


def _launch(
    x: Tensor, v: Tensor, code: int, offset: float, log_decay: Tensor | None = None, *, normalized: bool = True
) -> Any:
    from fast_attention.gpu.launching import Launch

    return Launch.of(x, v, code, offset, log_decay, normalized=normalized)


@launched
def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor | None, *,
    keep: bool, eps: float, code: int, offset: float, normalized: bool = True,
) -> Passed:  # fmt: skip
    run, mask = _launch(q, v, code, offset, log_decay, normalized=normalized), as_bytes(key_mask, k)
    q, k, v = contiguous(q, k, v)
    states, last = run.sums(k, v, mask, None if first is None else first.contiguous())
    out, factors, rest = run.outputs(q, k, v, mask, states, eps, is_causal=True, keep=keep)
    return (out, last), (factors, rest, states)


def _scan_like(q: Tensor, k: Tensor, v: Tensor, *others: Any, keep: bool, **settings: Any) -> Passed:
    (batch, heads, length, D), E = q.shape, v.shape[-1]
    chunk = configuration(D, E, exact=False).chunk
    wide = q.new_empty((batch, heads, D * E + D), dtype=torch.float32)
    states = wide.new_empty((batch, heads, (length + chunk - 1) // chunk, D * E + D))
    out = q.new_empty((batch, heads, length, E))
    return (out, wide), (wide.new_empty((batch, heads, length)), rest_like(out, keep), states)


@launched
def _scan_vjp(
    inputs: Any, outputs: Any, saved: Any, gradients: Any, *, eps: float, code: int, offset: float,
    normalized: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, key_mask, first, log_decay), (out, last), (grad, d_last) = inputs, outputs, gradients
    factors, rest, states = saved
    run, mask = _launch(q, v, code, offset, log_decay, normalized=normalized), as_bytes(key_mask, k)
    q, k, v, grad = contiguous(q, k, v, grad)
    weights = run.weights(out, rest, grad, factors)
    d_carry, d_first = run.sums(q, grad, None, d_last.contiguous(), factors=factors, weights=weights, backwards=True)
    dq, of_queries = run.of_queries(q, k, v, mask, grad, factors, weights, states, is_causal=True)
    dk, dv, of_keys = run.of_keys(q, k, v, mask, grad, factors, weights, d_carry, is_causal=True)
    d_first, d_decay = None if first is None else d_first, None
    if log_decay is not None:
        totals = of_queries.sum(-2, dtype=torch.float64) - of_keys.sum(-2, dtype=torch.float64)
        totals[..., -1] += (d_last.double() * last).sum(-1)  # what the sums of all decays from the first token on get
        d_decay = totals.flip(-1).cumsum(-1).flip(-1).to(log_decay.dtype)
    return dq, dk, dv, None, d_first, d_decay


@launched
def _step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, log_decay: Tensor | None, *, eps: float,
    code: int, offset: float, normalized: bool,
) -> Results:  # fmt: skip
    from fast_attention.gpu import launching

    (q, k, v), decay = contiguous(q, k, v), None if log_decay is None else log_decay.exp().contiguous()
    mask = as_bytes(key_mask, k)
    return launching.step(q, k, v, mask, state.contiguous(), eps, code, offset, decay, normalized=normalized)


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


chunk_scan = kernels(plain.scan, _scan, _scan_vjp, _scan_like, outputs=2)
key_sums = kernels(plain.key_sums, _sums, _sums_vjp, _sums_like)
read_sums = kernels(plain.read_sums, _read, _read_vjp, _read_like)


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
