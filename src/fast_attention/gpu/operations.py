"""The kernels of chunk sums as torch operations: for eager code, ``torch.compile``, ``torch.export`` and autograd.

Tensors are (B, H, n, width); states are (B, H, D E + D) in float32, ``sum_j phi(k_j) v_j^T`` in a row and
``sum_j phi(k_j)`` behind it. ``code`` and ``offset`` name the feature map (``maps.code``). Triton is imported by the
first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu import plain
from fast_attention.gpu.registering import as_bytes, contiguous, differentiable, empty, operation, rest_like, zeros
from fast_attention.gpu.walking import Forms

Results = tuple[Tensor, ...]
MAP = "int code, float offset"
KEPT = "bool keep"  # for a backward pass: what rounding took of outputs in sixteen bits


def _launch(x: Tensor, v: Tensor, code: int, offset: float) -> Any:
    from fast_attention.gpu.launching import Launch

    return Launch.of(x, v, code, offset)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, eps: float, code: int,
    offset: float, keep: bool,
) -> Results:  # fmt: skip
    run, mask = _launch(q, v, code, offset), as_bytes(key_mask, k)
    q, k, v = contiguous(q, k, v)
    states, last = run.sums(k, v, mask, None if first is None else first.contiguous())
    out, factors, rest = run.outputs(q, k, v, mask, states, eps, is_causal=True, keep=keep)
    return out, last, factors, rest, states


def scan_like(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, first: Any, eps: float, code: int, offset: float, keep: bool
) -> Results:
    """The sizes of what a causal call returns."""
    from fast_attention.gpu.configurations import configuration

    (batch, heads, length, D), E = q.shape, v.shape[-1]
    chunk = configuration(D, E, exact=False).chunk
    wide = q.new_empty((batch, heads, D * E + D), dtype=torch.float32)
    states = wide.new_empty((batch, heads, (length + chunk - 1) // chunk, D * E + D))
    out = q.new_empty((batch, heads, length, E))
    return out, wide, wide.new_empty((batch, heads, length)), rest_like(out, keep), states


def _scan_vjp(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, out: Tensor, factors: Tensor, rest: Tensor,
    states: Tensor, grad: Tensor, d_last: Tensor, code: int, offset: float,
) -> Results:  # fmt: skip
    run, mask = _launch(q, v, code, offset), as_bytes(key_mask, k)
    q, k, v, grad = contiguous(q, k, v, grad)
    weights = run.weights(out, rest, grad, factors)
    behind, d_first = run.sums(
        q, grad, None, d_last.contiguous(), factors=factors, weights=weights, backwards=True
    )  # fmt: skip
    dq, _ = run.of_queries(q, k, v, mask, grad, factors, weights, states, is_causal=True)
    return dq, *run.of_keys(q, k, v, mask, grad, factors, weights, behind, is_causal=True)[:2], d_first


def _step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, eps: float, code: int, offset: float
) -> Results:
    from fast_attention.gpu import launching

    q, k, v = contiguous(q, k, v)
    return launching.step(q, k, v, as_bytes(key_mask, k), state.contiguous(), eps, code, offset)


def _sums(k: Tensor, v: Tensor, key_mask: Tensor | None, code: int, offset: float) -> Tensor:
    mask = as_bytes(key_mask, k)
    return _launch(k, v, code, offset).sums(*contiguous(k, v), mask, None)[1]


def _sums_vjp(k: Tensor, v: Tensor, key_mask: Tensor | None, d_sums: Tensor, code: int, offset: float) -> Results:
    run, mask = _launch(k, v, code, offset), as_bytes(key_mask, k)
    k, v = contiguous(k, v)
    return run.of_keys(k, k, v, mask, v, d_sums, d_sums, d_sums.contiguous(), is_causal=False)[:2]


def _read(q: Tensor, sums: Tensor, eps: float, code: int, offset: float, keep: bool) -> Results:
    (q,), v = contiguous(q), q.new_empty((*q.shape[:2], 1, sums.shape[-1] // q.shape[-1] - 1))
    run = _launch(q, v, code, offset)
    return run.outputs(q, q, v, None, sums.contiguous(), eps, is_causal=False, keep=keep)


def _read_like(q: Tensor, sums: Tensor, eps: float, code: int, offset: float, keep: bool) -> Results:
    out = q.new_empty((*q.shape[:-1], sums.shape[-1] // q.shape[-1] - 1))
    return out, sums.new_empty(q.shape[:-1]), rest_like(out, keep)


def _read_vjp(
    q: Tensor, sums: Tensor, out: Tensor, factors: Tensor, rest: Tensor, grad: Tensor, code: int, offset: float
) -> Results:  # fmt: skip
    q, grad = contiguous(q, grad)
    run = _launch(q, grad, code, offset)
    weights = run.weights(out, rest, grad, factors)
    d_sums = run.sums(q, grad, None, None, factors=factors, weights=weights)[1]
    return run.of_queries(q, q, grad, None, grad, factors, weights, sums.contiguous(), is_causal=False)[0], d_sums


chunk_scan = operation(
    "chunk_scan", f"Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? first, float eps, {MAP}, {KEPT}",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)", _scan, scan_like,
)  # fmt: skip
_chunk_scan_vjp = operation(
    "chunk_scan_backward",
    f"Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor out, Tensor factors, Tensor rest, Tensor states, "
    f"Tensor grad, Tensor d_last, {MAP}",
    "(Tensor, Tensor, Tensor, Tensor)", _scan_vjp, lambda q, k, v, m, o, f, r, s, g, last, *x: empty(q, k, v, last),
)  # fmt: skip
key_sums = operation(
    "key_sums", f"Tensor k, Tensor v, Tensor? key_mask, {MAP}", "Tensor", _sums,
    lambda k, v, *x: k.new_empty((*k.shape[:2], k.shape[-1] * v.shape[-1] + k.shape[-1]), dtype=torch.float32),
)  # fmt: skip
one_step = operation(  # without a gradient
    "one_step", f"Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor state, float eps, {MAP}", "(Tensor, Tensor)",
    _step, lambda q, k, v, mask, state, *x: (q.new_empty((*q.shape[:-1], v.shape[-1])), *empty(state)),
)  # fmt: skip
_key_sums_vjp = operation(
    "key_sums_backward", f"Tensor k, Tensor v, Tensor? key_mask, Tensor d_sums, {MAP}", "(Tensor, Tensor)", _sums_vjp,
    lambda k, v, *x: empty(k, v),
)  # fmt: skip
read_sums = operation(
    "read_sums", f"Tensor q, Tensor sums, float eps, {MAP}, {KEPT}", "(Tensor, Tensor, Tensor)", _read, _read_like
)  # fmt: skip
_read_sums_vjp = operation(
    "read_sums_backward", f"Tensor q, Tensor sums, Tensor out, Tensor factors, Tensor rest, Tensor grad, {MAP}",
    "(Tensor, Tensor)",
    _read_vjp, lambda q, sums, *x: empty(q, sums),
)  # fmt: skip


def _of_scan(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    q, k, v, key_mask, _ = given
    out, last, factors, rest, states = results
    grad, d_last = zeros(gradients[0], out), zeros(gradients[1], last)
    dq, dk, dv, d_first = _chunk_scan_vjp(q, k, v, key_mask, out, factors, rest, states, grad, d_last, *numbers[1:3])
    return dq, dk, dv, None, d_first  # type: ignore[return-value]


def _of_sums(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    return _key_sums_vjp(*given, gradients[0], *numbers)


def _of_read(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    return _read_sums_vjp(*given, *results, gradients[0], *numbers[1:3])


differentiable(chunk_scan, plain.scan, _of_scan, tensors=5, visible=2)
differentiable(key_sums, plain.key_sums, _of_sums, tensors=3, visible=1)
differentiable(read_sums, plain.read_sums, _of_read, tensors=2, visible=1)


def forms(eps: float, code: int, offset: float, keep: bool) -> Forms:
    """The kernels with one map."""
    return Forms(
        lambda q, k, v, mask, first: chunk_scan(q, k, v, mask, first, eps, code, offset, keep)[:2],
        lambda k, v, mask: key_sums(k, v, mask, code, offset),
        lambda q, sums: read_sums(q, sums, eps, code, offset, keep)[0],
        lambda q, k, v, mask, state: one_step(q, k, v, mask, state, eps, code, offset),
    )
