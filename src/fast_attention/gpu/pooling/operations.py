"""The kernels of pools as operations, as ``gpu.operations`` has those of chunk sums.

Tokens are (B, H, n, C), pools (B, H, 3 C) in float32: the largest key of every channel, which has no gradient, and over
its exponential the sums of ``exp(k_j) v_j`` and of ``exp(k_j)``. ``gated``: outputs times ``sigmoid(q)``; ``keep``: for
a backward pass, what rounding took of outputs in sixteen bits and the logarithms of denominators. ``begins`` (chunks,):
which chunks are the first of a packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.decay import decayed_sums, spread
from fast_attention.engine.scan import FLOOR, running_max
from fast_attention.gpu.calls import KernelSet, as_bytes, contiguous, kernels, launched, one_by_one, rest_like
from fast_attention.gpu.operations import Passed


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None, *,
    gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first pool, and the pool after: the reference of ``pool_scan``."""
    if begins is not None:
        return one_by_one(plain_scan, q, k, v, key_mask, first, begins, None, gated=gated)
    keys, terms, C = *_keys_and_terms(k, v, key_mask), k.shape[-1]
    if first is not None:
        top, sums = first[..., None, :C].to(keys.dtype), first[..., None, C:].to(keys.dtype)
        keys, terms = torch.cat([top.detach(), keys], -2), torch.cat([sums, terms], -2)
    tops = running_max(keys.detach())
    rows = decayed_sums(spread((keys - tops).exp(), 2 * C) * terms, tops)
    last = torch.cat([tops[..., -1, :], rows[..., -1, :]], -1)
    return _gated(q, rows[..., int(first is not None) :, :], gated), last


def plain_sums(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """The pool of some keys."""
    keys, terms = _keys_and_terms(k, v, key_mask)
    top = keys.detach().amax(-2, keepdim=True)
    rows = (spread((keys - top).exp(), terms.shape[-1]) * terms).sum(-2)
    return torch.cat([top[..., 0, :], rows], -1)


def plain_read(q: Tensor, pool: Tensor, *, gated: bool) -> Tensor:
    """Read one pool for every query."""
    return _gated(q, pool[..., None, q.shape[-1] :], gated)


def _keys_and_terms(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys, hidden ones at ``FLOOR``, and values beside ones, zeros where hidden."""
    k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
    terms = torch.cat([v, torch.ones_like(k)], -1)
    if key_mask is None:
        return k, terms
    hidden = ~key_mask[..., None]
    return k.masked_fill(hidden, FLOOR), terms.masked_fill(hidden, 0.0)


def _gated(q: Tensor, rows: Tensor, gated: bool) -> Tensor:
    """Numerators over denominators, in the dtype of queries; ``gated``: times ``sigmoid(q)``."""
    numerator, denominator = rows.chunk(2, -1)
    nothing = denominator == 0
    means = (numerator / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
    means = F.sigmoid(q.to(means.dtype)) * means if gated else means.expand(q.shape)
    return means.to(q.dtype)


def _launch(x: Tensor, begins: Tensor | None = None) -> Any:
    from fast_attention.gpu.pooling.launching import Launch

    return Launch(x, begins)


@launched
def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None, *,
    keep: bool, gated: bool,
) -> Passed:  # fmt: skip
    (q, k, v), mask, run = contiguous(q, k, v), as_bytes(key_mask, k), _launch(k, begins)
    pools, settings = None if first is None else first.contiguous(), {"gated": gated, "keep": keep, "is_causal": True}
    if run.chunks == 1:
        last = run.empty(3 * run.width)
        out, rest, logs = run.outputs(q, k, v, mask, pools, last, **settings)
        return (out, last), (rest, logs)
    pools, last = run.pools(k, v, mask, pools)
    out, rest, logs = run.outputs(q, k, v, mask, pools, None, **settings)
    return (out, last), (rest, logs)


def _scan_like(q: Tensor, *others: Any, keep: bool, gated: bool) -> Passed:
    out, wide = q.new_empty(q.shape), q.new_empty((*q.shape[:-2], 3 * q.shape[-1]), dtype=torch.float32)
    logs = (*q.shape,) if keep else (*q.shape[:2], 0)
    return (out, wide), (rest_like(out, keep), wide.new_empty(logs))


@launched
def _scan_vjp(inputs: Any, outputs: Any, saved: Any, gradients: Any, *, gated: bool) -> tuple[Tensor | None, ...]:
    (q, k, v, key_mask, first, begins), (out, last), (rest, logs), (grad, d_last) = inputs, outputs, saved, gradients
    (q, k, v, grad), mask, run, C = contiguous(q, k, v, grad), as_bytes(key_mask, k), _launch(k, begins), k.shape[-1]
    top, d_numerator, d_denominator = last[..., :C], d_last[..., C : 2 * C], d_last[..., 2 * C :]
    after = torch.cat([top, d_numerator, -d_denominator], -1)
    dq, sums, whole = run.of_queries(q, out, rest, logs, grad, after, gated=gated)
    dk, dv = run.of_keys(k, v, mask, sums, (q, out, rest, logs, grad), gated=gated)
    if first is None:
        return dq, dk, dv, None, None, None
    scale, a, b = whole.chunk(3, -1)
    decay = (first[..., :C] - scale).exp()
    return dq, dk, dv, None, torch.cat([torch.zeros_like(a), a * decay, -b * decay], -1), None


@launched
def _sums(k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool) -> Passed:
    mask = as_bytes(key_mask, k)
    return _launch(k).pools(*contiguous(k, v), mask, None)[1], ()


def _sums_like(k: Tensor, *others: Any, keep: bool) -> Passed:
    return k.new_empty((*k.shape[:-2], 3 * k.shape[-1]), dtype=torch.float32), ()


@launched
def _sums_vjp(inputs: Any, outputs: Any, saved: Any, gradients: Any) -> tuple[Tensor | None, ...]:
    (k, v, key_mask), (pool,), (d_pool,) = inputs, outputs, gradients
    (k, v), mask, C = contiguous(k, v), as_bytes(key_mask, k), k.shape[-1]
    sums = torch.cat([pool[..., :C], d_pool[..., C : 2 * C], -d_pool[..., 2 * C :]], -1)
    return *_launch(k).of_keys(k, v, mask, sums, None, gated=False), None


@launched
def _read(q: Tensor, pool: Tensor, *, keep: bool, gated: bool) -> Passed:
    (q,), pool = contiguous(q), pool.contiguous()
    out, rest = _launch(q).outputs(q, q, q, None, pool, None, gated=gated, keep=keep, is_causal=False)[:2]
    return out, (rest,)


def _read_like(q: Tensor, pool: Tensor, *, keep: bool, gated: bool) -> Passed:
    return q.new_empty(q.shape), (rest_like(q, keep),)


@launched
def _read_vjp(inputs: Any, outputs: Any, saved: Any, gradients: Any, *, gated: bool) -> tuple[Tensor | None, ...]:
    (q, pool), (out,), (rest,) = inputs, outputs, saved
    (q, grad), (_, _, denominator) = contiguous(q, gradients[0]), pool.chunk(3, -1)
    dq, _, whole = _launch(q).of_queries(q, out, rest, q, grad, None, gated=gated)
    nothing = denominator == 0
    factor = (1.0 / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
    _, a, b = whole.chunk(3, -1)
    return dq, torch.cat([torch.zeros_like(a), a * factor, -b * factor], -1)


pool_scan = kernels(plain_scan, _scan, _scan_vjp, _scan_like, outputs=2)
pool_sums = kernels(plain_sums, _sums, _sums_vjp, _sums_like)
pool_read = kernels(plain_read, _read, _read_vjp, _read_like)


def kernel_set(gated: bool, begins: Tensor | None = None) -> KernelSet:
    """The kernels; ``begins``: of packed sequences, causal."""
    return KernelSet(
        lambda q, k, v, mask, first: pool_scan(q, k, v, mask, first, begins, gated=gated),
        pool_sums,
        lambda q, pool: pool_read(q, pool, gated=gated),
        lambda q, k, v, mask, pool: pool_scan(q, k, v, mask, pool, None, gated=gated),
    )
