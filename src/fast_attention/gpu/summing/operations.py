"""The kernels of scores that are sums as torch operations, as ``gpu.operations`` has those of chunk sums.

Tokens are (B, H, n, C): q and k the scores of queries and keys, which one number may serve (stride 0), v the values.
Sums are (B, H, 4 C) in float32: over keys ``v_j``, ``k_j v_j``, ``k_j`` and 1, of which the last has no gradient.
``divisor``: see ``plain``; ``dtype``: of outputs, without one that of queries. ``begins`` (chunks,): which chunks are
the first of a packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu.forms import Forms
from fast_attention.gpu.registering import as_bytes, contiguous, differentiable, empty, operation, zeros
from fast_attention.gpu.summing import plain

Results = tuple[Tensor, ...]
TOKENS = "Tensor q, Tensor k, Tensor v, Tensor? key_mask"


def _launch(x: Tensor, begins: Tensor | None = None) -> Any:
    from fast_attention.gpu.summing.launching import Launch

    return Launch(x, begins)


def _readable(*scores: Tensor) -> list[Tensor]:
    """Scores as kernels read them: one number for all channels stays one."""
    return [x if x.stride(-1) == 0 else contiguous(x)[0] for x in scores]


def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None, divisor: int,
    dtype: torch.dtype | None,
) -> Results:  # fmt: skip
    (q, k), (v,), mask, run = _readable(q, k), contiguous(v), as_bytes(key_mask, v), _launch(v, begins)
    sums, settings = _row(first), {"is_causal": True, "divisor": divisor, "dtype": dtype or q.dtype}
    if run.chunks == 1:
        last = run.empty(4 * run.width)
        return run.outputs(q, k, v, mask, sums, last, **settings), last
    sums, last = run.sums(k, v, mask, sums)
    return run.outputs(q, k, v, mask, sums, None, **settings), last


def _scan_vjp(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None, grad: Tensor,
    d_last: Tensor, divisor: int,
) -> Results:  # fmt: skip
    (q, k), (v, grad), mask, run = _readable(q, k), contiguous(v, grad), as_bytes(key_mask, v), _launch(v, begins)
    sums = _row(first) if run.chunks == 1 else run.sums(k, v, mask, _row(first))[0]
    dq, given, *stored = run.of_queries(q, k, v, mask, sums, grad, is_causal=True, divisor=divisor)
    whole = run.running(given, _of_sums_alone(d_last), backwards=True)
    dk, dv = run.of_keys(k, v, mask, given, (q, *stored), divisor=divisor)
    return dq, dk, dv, whole.new_zeros(0) if first is None else _with_counts(whole)


def _sums(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    (k,), (v,), mask = _readable(k), contiguous(v), as_bytes(key_mask, v)
    return _launch(v).sums(k, v, mask, None)[1]


def _sums_vjp(k: Tensor, v: Tensor, key_mask: Tensor | None, d_sums: Tensor) -> Results:
    (k,), (v,), mask = _readable(k), contiguous(v), as_bytes(key_mask, v)
    return _launch(v).of_keys(k, v, mask, _of_sums_alone(d_sums), None, divisor=plain.NOTHING)


def _read(q: Tensor, state: Tensor, divisor: int, dtype: torch.dtype | None) -> Tensor:
    (q,), sums = _readable(q), state.contiguous()
    settings = {"is_causal": False, "divisor": divisor, "dtype": dtype or q.dtype}
    return _launch(q).outputs(q, q, q, None, sums, None, **settings)


def _read_vjp(q: Tensor, state: Tensor, grad: Tensor, divisor: int) -> Results:
    (q,), (grad,), sums, run = _readable(q), contiguous(grad), state.contiguous(), _launch(q)
    dq, given, *_ = run.of_queries(q, q, q, None, sums, grad, is_causal=False, divisor=divisor)
    return dq, _with_counts(run.running(given, None, backwards=True))


def _row(first: Tensor | None) -> Tensor | None:
    return None if first is None else first.contiguous()


def _of_sums_alone(row: Tensor) -> Tensor:
    """Without the part of the number of keys."""
    return row[..., : row.shape[-1] // 4 * 3].contiguous()


def _with_counts(row: Tensor) -> Tensor:
    """With zeros for the number of keys."""
    return torch.cat([row, row.new_zeros((*row.shape[:-1], row.shape[-1] // 3))], -1)


def _out_like(q: Tensor, dtype: torch.dtype | None) -> Tensor:
    return q.new_empty(q.shape, dtype=dtype or q.dtype)


def _sums_like(k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    return v.new_empty((*v.shape[:-2], 4 * v.shape[-1]), dtype=torch.float32)


score_scan = operation(
    "score_scan", f"{TOKENS}, Tensor? first, Tensor? begins, int divisor, ScalarType? dtype", "(Tensor, Tensor)", _scan,
    lambda q, k, v, mask, first, begins, divisor, dtype: (_out_like(q, dtype), _sums_like(k, v)),
)  # fmt: skip
_score_scan_vjp = operation(
    "score_scan_backward",
    f"{TOKENS}, Tensor? first, Tensor? begins, Tensor grad, Tensor d_last, int divisor",
    "(Tensor, Tensor, Tensor, Tensor)", _scan_vjp,
    lambda q, k, v, mask, first, begins, grad, d_last, divisor: (
        *empty(q, k, v), d_last.new_empty(0 if first is None else first.shape)
    ),
)  # fmt: skip
score_sums = operation("score_sums", "Tensor k, Tensor v, Tensor? key_mask", "Tensor", _sums, _sums_like)
_score_sums_vjp = operation(
    "score_sums_backward", "Tensor k, Tensor v, Tensor? key_mask, Tensor d_sums", "(Tensor, Tensor)", _sums_vjp,
    lambda k, v, *x: empty(k, v),
)  # fmt: skip
score_read = operation(
    "score_read", "Tensor q, Tensor state, int divisor, ScalarType? dtype", "Tensor", _read,
    lambda q, state, divisor, dtype: _out_like(q, dtype),
)  # fmt: skip
_score_read_vjp = operation(
    "score_read_backward", "Tensor q, Tensor state, Tensor grad, int divisor", "(Tensor, Tensor)", _read_vjp,
    lambda q, state, *x: empty(q, state),
)  # fmt: skip


def _of_scan(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    grad, d_last = (zeros(x, y) for x, y in zip(gradients, results, strict=True))
    dq, dk, dv, d_first = _score_scan_vjp(*given, grad, d_last, numbers[0])
    return dq, dk, dv, None, None if given[4] is None else d_first  # type: ignore[return-value]


def _of_sums(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    return _score_sums_vjp(*given, gradients[0])


def _of_read(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    return _score_read_vjp(*given, gradients[0], numbers[0])


differentiable(score_scan, plain.scan, _of_scan, tensors=6, visible=2)
differentiable(score_sums, plain.sums, _of_sums, tensors=3, visible=1)
differentiable(score_read, plain.read, _of_read, tensors=2, visible=1)


def forms(divisor: int, dtype: torch.dtype | None = None, begins: Tensor | None = None) -> Forms:
    """The kernels, scores in float32; outputs in ``dtype``, without one in that of queries."""

    def scan(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor]:
        return score_scan(q.float(), k.float(), v, mask, first, begins, divisor, dtype or q.dtype)

    return Forms(
        scan,
        lambda k, v, mask: score_sums(k.float(), v, mask),
        lambda q, state: score_read(q.float(), state, divisor, dtype or q.dtype),
        scan,
    )
