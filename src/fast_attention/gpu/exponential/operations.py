"""The kernels of exponential features as torch operations, as ``gpu.operations`` has those of elementwise ones.

Tokens are (B, H, n, width), rows of queries and of keys (H, D, width), a bias of the logarithms (H, D); states are
(B, H, D E + 2 D) in float32: ``sum_j phi(k_j) v_j^T``, ``sum_j phi(k_j)`` and the logarithms of what both are divided
by. ``trained``: gradients of rows are wanted; the bias has none. ``begins`` (chunks,): which chunks are the first of a
packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu.configurations import exponential
from fast_attention.gpu.exponential import plain
from fast_attention.gpu.registering import as_bytes, contiguous, differentiable, empty, operation, rest_like, zeros
from fast_attention.gpu.walking import Forms

Results = tuple[Tensor, ...]
TOKENS, ROWS = "Tensor q, Tensor k, Tensor v, Tensor? key_mask", "Tensor query_rows, Tensor key_rows, Tensor? bias"
READ = "Tensor out, Tensor rest, Tensor factors, Tensor shifts"


def _launching() -> Any:
    from fast_attention.gpu.exponential import launching

    return launching


def _launch(
    x: Tensor, query_rows: Tensor, key_rows: Tensor, bias: Tensor | None, *, trained: bool = False,
    begins: Tensor | None = None,
) -> Any:  # fmt: skip
    return _launching().Launch.of(x, query_rows, key_rows, bias, trained=trained, begins=begins)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, query_rows: Tensor,
    key_rows: Tensor, bias: Tensor | None, begins: Tensor | None, keep: bool, trained: bool,
) -> Results:  # fmt: skip
    run, mask = _launch(q, query_rows, key_rows, bias, begins=begins), as_bytes(key_mask, k)
    q, k, v = contiguous(q, k, v)
    states, last = run.sums(k, v, mask, None if first is None else first.contiguous())
    out, *others = run.outputs(q, k, v, mask, states, is_causal=True, keep=keep)
    return out, last, *others, states


def _scan_like(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, first: Any, query_rows: Tensor, key_rows: Tensor, bias: Any,
    begins: Any, keep: bool, trained: bool,
) -> Results:  # fmt: skip
    (batch, heads, length, width), numbers = q.shape, key_rows.shape[-2] * (v.shape[-1] + 2)
    chunk = exponential(width, exact=q.dtype == torch.float32).forward.chunk
    last = q.new_empty((batch, heads, numbers), dtype=torch.float32)
    states = last.new_empty((batch, heads, (length + chunk - 1) // chunk, numbers))
    out, *others = _read_like(q, last, query_rows, bias, keep, trained)
    return out, last, *others, states


def _scan_vjp(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_rows: Tensor, key_rows: Tensor,
    bias: Tensor | None, begins: Tensor | None, out: Tensor, rest: Tensor, factors: Tensor, shifts: Tensor,
    states: Tensor, last: Tensor, grad: Tensor, d_last: Tensor, trained: bool,
) -> Results:  # fmt: skip
    run, mask = _launch(q, query_rows, key_rows, bias, trained=trained, begins=begins), as_bytes(key_mask, k)
    q, k, v, grad = contiguous(q, k, v, grad)
    read, behind = _launching().Read(out, rest, factors, shifts), _over_scales(d_last, last, key_rows.shape[-2])
    weights = run.denominators(read, grad)
    behind, whole = run.sums(q, grad, None, behind, read=read, weights=weights)
    given = q, k, v, mask, grad, read, weights
    dq, d_queries = run.of_queries(*given, states, is_causal=True)
    dk, d_keys, dv = run.of_keys(*given, behind, is_causal=True)
    return dq, dk, dv, whole, _of_rows(d_queries, q, query_rows), _of_rows(d_keys, k, key_rows)


def _sums(
    k: Tensor, v: Tensor, key_mask: Tensor | None, key_rows: Tensor, bias: Tensor | None, trained: bool
) -> Tensor:
    return _launch(k, key_rows, key_rows, bias).sums(*contiguous(k, v), as_bytes(key_mask, k), None)[1]


def _sums_vjp(
    k: Tensor, v: Tensor, key_mask: Tensor | None, key_rows: Tensor, bias: Tensor | None, sums: Tensor, d_sums: Tensor,
    trained: bool,
) -> Results:  # fmt: skip
    run, mask = _launch(k, key_rows, key_rows, bias, trained=trained), as_bytes(key_mask, k)
    k, v = contiguous(k, v)
    state = _over_scales(d_sums, sums, key_rows.shape[-2])
    dk, d_keys, dv = run.of_keys(k, k, v, mask, v, _launching().Read(v, v, sums, sums), sums, state, is_causal=False)
    return dk, dv, _of_rows(d_keys, k, key_rows)


def _read(q: Tensor, sums: Tensor, query_rows: Tensor, bias: Tensor | None, keep: bool, trained: bool) -> Results:
    run, (q,) = _launch(q, query_rows, query_rows, bias), contiguous(q)
    v = q.new_empty((*q.shape[:2], 1, sums.shape[-1] // query_rows.shape[-2] - 2))
    return tuple(run.outputs(q, q, v, None, sums.contiguous(), is_causal=False, keep=keep))


def _read_like(q: Tensor, sums: Tensor, query_rows: Tensor, bias: Any, keep: bool, trained: bool) -> Results:
    out = q.new_empty((*q.shape[:-1], sums.shape[-1] // query_rows.shape[-2] - 2))
    return out, rest_like(out, keep), sums.new_empty(q.shape[:-1]), sums.new_empty(q.shape[:-1])


def _read_vjp(
    q: Tensor, sums: Tensor, query_rows: Tensor, bias: Tensor | None, out: Tensor, rest: Tensor, factors: Tensor,
    shifts: Tensor, grad: Tensor, trained: bool,
) -> Results:  # fmt: skip
    run, (q, grad) = _launch(q, query_rows, query_rows, bias, trained=trained), contiguous(q, grad)
    read = _launching().Read(out, rest, factors, shifts)
    weights = run.denominators(read, grad)
    whole = run.sums(q, grad, None, None, read=read, weights=weights)[1]
    dq, d_queries = run.of_queries(q, q, grad, None, grad, read, weights, sums.contiguous(), is_causal=False)
    return dq, whole, _of_rows(d_queries, q, query_rows)


def _over_scales(gradient: Tensor, state: Tensor, D: int) -> Tensor:
    """The gradient of a state's sums as a state of its own: over the inverse of their scales."""
    return torch.cat([gradient[..., :-D], -state[..., -D:]], -1)


def _at_scales(gradient: Tensor, state: Tensor, D: int) -> Tensor:
    """The gradient of sums at their scales, from a state of sums over queries; scales have none."""
    factors = (gradient[..., -D:] + state[..., -D:]).exp()
    products = gradient[..., : -2 * D].unflatten(-1, (D, -1)) * factors[..., None]
    return torch.cat([products.flatten(-2), gradient[..., -2 * D : -D] * factors, torch.zeros_like(factors)], -1)


def _of_rows(logs: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """The gradient of rows from that of tokens' logarithms; empty where it was not kept."""
    scaled = x.float() * x.shape[-1] ** -0.25
    return torch.einsum("bhnd,bhnw->hdw", logs, scaled) if logs.numel() else rows.new_empty((0,))


def _rows_like(trained: bool, *rows: Tensor) -> Results:
    return tuple(x.new_empty(x.shape if trained else (0,)) for x in rows)


feature_scan = operation(
    "feature_scan", f"{TOKENS}, Tensor? first, {ROWS}, Tensor? begins, bool keep, bool trained",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _scan, _scan_like,
)  # fmt: skip
_feature_scan_vjp = operation(
    "feature_scan_backward",
    f"{TOKENS}, {ROWS}, Tensor? begins, {READ}, Tensor states, Tensor last, Tensor grad, Tensor d_last, bool trained",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _scan_vjp,
    lambda q, k, v, m, a, b, c, i, o, r, f, s, states, last, g, d, trained: (
        *empty(q, k, v, last), *_rows_like(trained, a, b)
    ),
)  # fmt: skip
feature_sums = operation(
    "feature_sums", "Tensor k, Tensor v, Tensor? key_mask, Tensor key_rows, Tensor? bias, bool trained", "Tensor",
    _sums,
    lambda k, v, m, rows, *x: k.new_empty((*k.shape[:2], rows.shape[-2] * (v.shape[-1] + 2)), dtype=torch.float32),
)  # fmt: skip
_feature_sums_vjp = operation(
    "feature_sums_backward",
    "Tensor k, Tensor v, Tensor? key_mask, Tensor key_rows, Tensor? bias, Tensor sums, Tensor d_sums, bool trained",
    "(Tensor, Tensor, Tensor)", _sums_vjp, lambda k, v, m, rows, *x: (*empty(k, v), *_rows_like(x[-1], rows)),
)  # fmt: skip
feature_read = operation(
    "feature_read", "Tensor q, Tensor sums, Tensor query_rows, Tensor? bias, bool keep, bool trained",
    "(Tensor, Tensor, Tensor, Tensor)", _read, _read_like,
)  # fmt: skip
_feature_read_vjp = operation(
    "feature_read_backward",
    f"Tensor q, Tensor sums, Tensor query_rows, Tensor? bias, {READ}, Tensor grad, bool trained",
    "(Tensor, Tensor, Tensor)", _read_vjp, lambda q, sums, rows, *x: (*empty(q, sums), *_rows_like(x[-1], rows)),
)  # fmt: skip


def _step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, query_rows: Tensor, key_rows: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    launching = _launching()
    weights = launching.Weights(query_rows, key_rows, bias, trained=False)
    q, k, v = contiguous(q, k, v)
    return launching.step(q, k, v, as_bytes(key_mask, k), state.contiguous(), weights)


feature_step = operation(
    "feature_step", f"{TOKENS}, Tensor state, {ROWS}", "(Tensor, Tensor)", _step,
    lambda q, k, v, mask, state, *x: (q.new_empty((*q.shape[:-1], v.shape[-1])), *empty(state)),
)  # fmt: skip


def _of_scan(given: Any, results: Any, gradients: Any, numbers: Any) -> Any:
    q, k, v, key_mask, first, *rows, begins = given
    out, last, *read, states = results
    grad, d_last = zeros(gradients[0], out), zeros(gradients[1], last)
    given = q, k, v, key_mask, *rows, begins, out, *read, states, last, grad, d_last, numbers[1]
    dq, dk, dv, whole, *d_rows = _feature_scan_vjp(*given)
    d_first = None if first is None else _at_scales(whole, first, rows[1].shape[-2])
    return dq, dk, dv, None, d_first, *(d_rows if numbers[1] else ())


def _of_sums(given: Any, results: Any, gradients: Any, numbers: Any) -> Any:
    dk, dv, d_rows = _feature_sums_vjp(*given, *results, gradients[0], numbers[0])
    return dk, dv, None, d_rows if numbers[0] else None


def _of_read(given: Any, results: Any, gradients: Any, numbers: Any) -> Any:
    dq, whole, d_rows = _feature_read_vjp(*given, *results, gradients[0], numbers[1])
    return dq, _at_scales(whole, given[1], given[2].shape[-2]), d_rows if numbers[1] else None


differentiable(feature_scan, plain.scan, _of_scan, tensors=9, visible=2)
differentiable(feature_sums, plain.key_sums, _of_sums, tensors=5, visible=1)
differentiable(feature_read, plain.read_sums, _of_read, tensors=4, visible=1)


def forms(
    query_rows: Tensor, key_rows: Tensor, bias: Tensor | None, keep: bool, trained: bool, begins: Tensor | None = None
) -> Forms:
    """The kernels with one projection; ``begins``: of packed sequences, causal."""
    rows = query_rows, key_rows, bias, begins
    return Forms(
        lambda q, k, v, mask, first: feature_scan(q, k, v, mask, first, *rows, keep, trained)[:2],
        lambda k, v, mask: feature_sums(k, v, mask, key_rows, bias, trained),
        lambda q, sums: feature_read(q, sums, query_rows, bias, keep, trained)[0],
        lambda q, k, v, mask, state: feature_step(q, k, v, mask, state, query_rows, key_rows, bias),
    )
