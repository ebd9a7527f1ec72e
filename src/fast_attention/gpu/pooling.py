"""Kernels of pools as operations, and the same functions in operations that autograd follows.

Tokens are (B, H, n, C), pools (B, H, 3 C): the sums of ``exp(k_j) v_j`` and of ``exp(k_j)`` over the exponential of the
largest key of every channel, and that key, which has no gradient. ``gated``: outputs times ``sigmoid(q)``. ``begins``
(chunks,): which chunks are the first of a packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.decay import decayed_sums, spread
from fast_attention.engine.scan import FLOOR, running_max
from fast_attention.gpu.calls import KernelSet, one_by_one
from fast_attention.gpu.operations import Operations


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None, *,
    gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first pool, and the pool after: the reference of ``pool_scan``."""
    if begins is not None:
        return one_by_one(plain_scan, q, k, v, key_mask, first, begins, None, gated=gated)
    keys, terms, C = *_keys_and_terms(k, v, key_mask), k.shape[-1]
    if first is not None:
        sums, top = first[..., None, :].to(keys.dtype).split([2 * C, C], -1)
        keys, terms = torch.cat([top.detach(), keys], -2), torch.cat([sums, terms], -2)
    tops = running_max(keys.detach())
    rows = decayed_sums(spread((keys - tops).exp(), 2 * C) * terms, tops)
    last = torch.cat([rows[..., -1, :], tops[..., -1, :]], -1)
    return _gated(q, rows[..., int(first is not None) :, :], gated), last


def plain_sums(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """The pool of some keys."""
    keys, terms = _keys_and_terms(k, v, key_mask)
    top = keys.detach().amax(-2, keepdim=True)
    rows = (spread((keys - top).exp(), terms.shape[-1]) * terms).sum(-2)
    return torch.cat([rows, top[..., 0, :]], -1)


def plain_read(q: Tensor, pool: Tensor, *, gated: bool) -> Tensor:
    """Read one pool for every query."""
    return _gated(q, pool[..., None, : 2 * q.shape[-1]], gated)


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


def _launch(*given: Any, **settings: Any) -> Any:
    from fast_attention.gpu.pools import Launch

    return Launch(*given, **settings)


pool_scan, pool_sums, pool_read, _ = Operations.of(_launch, plain_scan, plain_sums, plain_read)


def kernel_set(gated: bool, begins: Tensor | None = None) -> KernelSet:
    """The kernels; ``begins``: of packed sequences, causal."""
    return KernelSet(
        lambda q, k, v, mask, first: pool_scan(q, k, v, mask, first, begins, gated=gated),
        pool_sums,
        lambda q, pool: pool_read(q, pool, gated=gated),
        lambda q, k, v, mask, pool: pool_scan(q, k, v, mask, pool, None, gated=gated),
    )
