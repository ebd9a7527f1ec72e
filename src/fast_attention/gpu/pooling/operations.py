"""The kernels of pools as torch operations, as ``gpu.operations`` has those of chunk sums.

Tokens are (B, H, n, C), pools (B, H, 3 C) in float32: the largest key of every channel, which has no gradient, and over
its exponential the sums of ``exp(k_j) v_j`` and of ``exp(k_j)``. ``gated``: outputs times ``sigmoid(q)``; ``keep``: for
a backward pass, what rounding took of outputs in sixteen bits and the logarithms of denominators. ``begins`` (chunks,):
which chunks are the first of a packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu.pooling import plain
from fast_attention.gpu.registering import as_bytes, contiguous, differentiable, empty, operation, rest_like, zeros
from fast_attention.gpu.walking import Forms

Results = tuple[Tensor, ...]
TOKENS = "Tensor q, Tensor k, Tensor v, Tensor? key_mask"


def _launch(x: Tensor, begins: Tensor | None = None) -> Any:
    from fast_attention.gpu.pooling.launching import Launch

    return Launch(x, begins)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None, gated: bool,
    keep: bool,
) -> Results:  # fmt: skip
    (q, k, v), mask, run = contiguous(q, k, v), as_bytes(key_mask, k), _launch(k, begins)
    pools, settings = None if first is None else first.contiguous(), {"gated": gated, "keep": keep, "is_causal": True}
    if run.chunks == 1:
        last = run.empty(3 * run.width)
        out, rest, logs = run.outputs(q, k, v, mask, pools, last, **settings)
        return out, last, rest, logs
    pools, last = run.pools(k, v, mask, pools)
    out, rest, logs = run.outputs(q, k, v, mask, pools, None, **settings)
    return out, last, rest, logs


def _scan_like(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, first: Any, begins: Any, gated: bool, keep: bool
) -> Results:  # fmt: skip
    (out,), wide = empty(q), q.new_empty((*q.shape[:-2], 3 * q.shape[-1]), dtype=torch.float32)
    logs = (*q.shape,) if keep else (*q.shape[:2], 0)
    return out, wide, rest_like(out, keep), wide.new_empty(logs)


def _scan_vjp(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None, out: Tensor,
    last: Tensor, rest: Tensor, logs: Tensor, grad: Tensor, d_last: Tensor, gated: bool,
) -> Results:  # fmt: skip
    (q, k, v, grad), mask, run, C = contiguous(q, k, v, grad), as_bytes(key_mask, k), _launch(k, begins), k.shape[-1]
    top, d_numerator, d_denominator = last[..., :C], d_last[..., C : 2 * C], d_last[..., 2 * C :]
    after = torch.cat([top, d_numerator, -d_denominator], -1)
    dq, sums, whole = run.of_queries(q, out, rest, logs, grad, after, gated=gated)
    dk, dv = run.of_keys(k, v, mask, sums, (q, out, rest, logs, grad), gated=gated)
    if first is None:
        return dq, dk, dv, whole.new_zeros(0)
    scale, a, b = whole.chunk(3, -1)
    decay = (first[..., :C] - scale).exp()
    return dq, dk, dv, torch.cat([torch.zeros_like(a), a * decay, -b * decay], -1)


def _sums(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    mask = as_bytes(key_mask, k)
    return _launch(k).pools(*contiguous(k, v), mask, None)[1]


def _sums_vjp(k: Tensor, v: Tensor, key_mask: Tensor | None, pool: Tensor, d_pool: Tensor) -> Results:
    (k, v), mask, C = contiguous(k, v), as_bytes(key_mask, k), k.shape[-1]
    sums = torch.cat([pool[..., :C], d_pool[..., C : 2 * C], -d_pool[..., 2 * C :]], -1)
    return _launch(k).of_keys(k, v, mask, sums, None, gated=False)


def _read(q: Tensor, pool: Tensor, gated: bool, keep: bool) -> Results:
    (q,), pool = contiguous(q), pool.contiguous()
    return _launch(q).outputs(q, q, q, None, pool, None, gated=gated, keep=keep, is_causal=False)[:2]


def _read_vjp(q: Tensor, pool: Tensor, out: Tensor, rest: Tensor, grad: Tensor, gated: bool) -> Results:
    (q, grad), (_, _, denominator) = contiguous(q, grad), pool.chunk(3, -1)
    dq, _, whole = _launch(q).of_queries(q, out, rest, q, grad, None, gated=gated)
    nothing = denominator == 0
    factor = (1.0 / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
    _, a, b = whole.chunk(3, -1)
    return dq, torch.cat([torch.zeros_like(a), a * factor, -b * factor], -1)


def _pool_like(k: Tensor, *others: Any) -> Tensor:
    return k.new_empty((*k.shape[:-2], 3 * k.shape[-1]), dtype=torch.float32)


pool_scan = operation(
    "pool_scan", f"{TOKENS}, Tensor? first, Tensor? begins, bool gated, bool keep",
    "(Tensor, Tensor, Tensor, Tensor)", _scan, _scan_like,
)  # fmt: skip
_pool_scan_vjp = operation(
    "pool_scan_backward",
    f"{TOKENS}, Tensor? first, Tensor? begins, Tensor out, Tensor last, Tensor rest, Tensor logs, Tensor grad, "
    "Tensor d_last, bool gated",
    "(Tensor, Tensor, Tensor, Tensor)", _scan_vjp,
    lambda q, k, v, mask, first, begins, out, last, *x: (
        *empty(q, k, v), last.new_empty(0 if first is None else last.shape)
    ),
)  # fmt: skip
pool_sums = operation("pool_sums", "Tensor k, Tensor v, Tensor? key_mask", "Tensor", _sums, _pool_like)
_pool_sums_vjp = operation(
    "pool_sums_backward", "Tensor k, Tensor v, Tensor? key_mask, Tensor pool, Tensor d_pool", "(Tensor, Tensor)",
    _sums_vjp, lambda k, v, *x: empty(k, v),
)  # fmt: skip
pool_read = operation(
    "pool_read", "Tensor q, Tensor pool, bool gated, bool keep", "(Tensor, Tensor)", _read,
    lambda q, pool, gated, keep: (*empty(q), rest_like(q, keep)),
)  # fmt: skip
_pool_read_vjp = operation(
    "pool_read_backward", "Tensor q, Tensor pool, Tensor out, Tensor rest, Tensor grad, bool gated",
    "(Tensor, Tensor)", _read_vjp, lambda q, pool, *x: empty(q, pool),
)  # fmt: skip


def _of_scan(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    q, k, v, key_mask, first, begins = given
    out, last, rest, logs = results
    if logs.numel() == 0:
        out, last, rest, logs = pool_scan(*given, numbers[0], True)
    grad, d_last = zeros(gradients[0], out), zeros(gradients[1], last)
    dq, dk, dv, d_first = _pool_scan_vjp(
        q, k, v, key_mask, first, begins, out, last, rest, logs, grad, d_last, numbers[0]
    )  # fmt: skip
    return dq, dk, dv, None, None if first is None else d_first  # type: ignore[return-value]


def _of_sums(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    return _pool_sums_vjp(*given, results[0], gradients[0])


def _of_read(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    return _pool_read_vjp(*given, *results, gradients[0], numbers[0])


differentiable(pool_scan, plain.scan, _of_scan, tensors=6, visible=2)
differentiable(pool_sums, plain.sums, _of_sums, tensors=3, visible=1)
differentiable(pool_read, plain.read, _of_read, tensors=2, visible=1)


def forms(gated: bool, keep: bool, begins: Tensor | None = None) -> Forms:
    """The kernels; ``begins``: of packed sequences, causal."""
    return Forms(
        lambda q, k, v, mask, first: pool_scan(q, k, v, mask, first, begins, gated, keep)[:2],
        pool_sums,
        lambda q, pool: pool_read(q, pool, gated, keep)[0],
        lambda q, k, v, mask, pool: pool_scan(q, k, v, mask, pool, None, gated, False)[:2],
    )
