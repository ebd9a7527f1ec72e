"""Kernels of pools as operations, and their references.

Tokens are (B, H, n, C), pools (B, H, 3 C): the sums of ``exp(k_j) v_j`` and of ``exp(k_j)`` over the exponential of the
largest key of every channel, and that key, which has no gradient. ``begins`` (chunks,): which chunks are the first of a
packed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu.calls import KernelSet, one_by_one
from fast_attention.gpu.operations import Operations
from fast_attention.gpu.self_check import Case
from fast_attention.mechanisms.aft import reference
from fast_attention.mechanisms.aft.reference import Pool


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal outputs behind a first pool, and the pool after: the reference of ``pool_scan``."""
    if begins is not None:
        return one_by_one(plain_scan, q, k, v, key_mask, first, begins, None)
    C, pool = k.shape[-1], None
    if first is not None:
        pool = Pool(first[..., None, 2 * C :].detach(), first[..., None, : 2 * C])
    rows = reference.running(*reference.prepended(pool, *reference.terms(k, v, key_mask)))
    last = torch.cat([rows.sums[..., -1, :], rows.log_scale[..., -1, :]], -1)
    return q.sigmoid() * reference.mean(rows.sums[..., 1:, :], C), last


def plain_sums(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """The pool of some keys."""
    pool = reference.pooled(*reference.terms(k, v, key_mask))
    return torch.cat([pool.sums, pool.log_scale], -1)[..., 0, :]


def plain_read(q: Tensor, pool: Tensor) -> Tensor:
    """Read one pool for every query."""
    C = q.shape[-1]
    return q.sigmoid() * reference.mean(pool[..., None, : 2 * C], C)


def _launch(*given: Any) -> Any:
    from fast_attention.gpu.pools import Launch

    return Launch(*given)


pool_scan, pool_sums, pool_read, _ = Operations.of(_launch, plain_scan, plain_sums, plain_read)


def kernel_set(begins: Tensor | None = None) -> KernelSet:
    """The kernels; ``begins``: of packed sequences, causal."""
    return KernelSet(
        lambda q, k, v, mask, first: pool_scan(q, k, v, mask, first, begins),
        pool_sums,
        pool_read,
        lambda q, k, v, mask, pool: pool_scan(q, k, v, mask, pool, None),
    )


def check() -> Case:
    """The self-check of the kernels."""
    return Case.of("pools", lambda device: kernel_set())
