"""The functions that kernels of pools compute, in operations that autograd follows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.decay import decayed_sums, spread
from fast_attention.engine.scan import FLOOR, running_max
from fast_attention.gpu.calls import one_by_one


def scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None, *,
    gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first pool, and the pool after: see ``operations.pool_scan``."""
    if begins is not None:
        return one_by_one(scan, q, k, v, key_mask, first, begins, None, gated=gated)
    keys, terms, C = *keys_and_terms(k, v, key_mask), k.shape[-1]
    if first is not None:
        top, sums = first[..., None, :C].to(keys.dtype), first[..., None, C:].to(keys.dtype)
        keys, terms = torch.cat([top.detach(), keys], -2), torch.cat([sums, terms], -2)
    tops = running_max(keys.detach())
    rows = decayed_sums(spread((keys - tops).exp(), 2 * C) * terms, tops)
    last = torch.cat([tops[..., -1, :], rows[..., -1, :]], -1)
    return gated_outputs(q, rows[..., int(first is not None) :, :], gated), last


def sums(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """The pool of some keys."""
    keys, terms = keys_and_terms(k, v, key_mask)
    top = keys.detach().amax(-2, keepdim=True)
    rows = (spread((keys - top).exp(), terms.shape[-1]) * terms).sum(-2)
    return torch.cat([top[..., 0, :], rows], -1)


def read(q: Tensor, pool: Tensor, *, gated: bool) -> Tensor:
    """Read one pool for every query."""
    return gated_outputs(q, pool[..., None, q.shape[-1] :], gated)


def keys_and_terms(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys, hidden ones at ``FLOOR``, and values beside ones, zeros where hidden."""
    k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
    terms = torch.cat([v, torch.ones_like(k)], -1)
    if key_mask is None:
        return k, terms
    hidden = ~key_mask[..., None]
    return k.masked_fill(hidden, FLOOR), terms.masked_fill(hidden, 0.0)


def gated_outputs(q: Tensor, rows: Tensor, gated: bool) -> Tensor:
    """Numerators over denominators, in the dtype of queries; ``gated``: times ``sigmoid(q)``."""
    numerator, denominator = rows.chunk(2, -1)
    nothing = denominator == 0
    means = (numerator / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
    means = F.sigmoid(q.to(means.dtype)) * means if gated else means.expand(q.shape)
    return means.to(q.dtype)
