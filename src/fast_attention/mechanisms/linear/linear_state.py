"""What linear attention sums up: the state after a stretch, what queries read in it, prefixes over chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.states import state_sums
from fast_attention.feature_maps.feature_map import Logs


class LinearState(NamedTuple):
    """What a stretch of keys and values leaves behind; the true sums are ``exp(top)`` times ``kv`` and ``k``."""

    kv: Float[Tensor, "*batch C values"]  # sum_j phi(k_j) v_j^T
    k: Float[Tensor, "*batch C"]  # sum_j phi(k_j)
    top: Float[Tensor, "*batch units"]  # largest logarithm of each feature, or one for all; 0 where there are none


class Sums(NamedTuple):
    """Numerators (..., L, Ev) and denominators (..., L) of the outputs, up to one factor per query."""

    numerator: Float[Tensor, "*batch length values"]
    denominator: Float[Tensor, "*batch length"]


def read(q: Float[Tensor, "*batch length C"] | Logs, state: LinearState) -> Sums:
    """What the queries' features find in a state, in units of ``exp(state.top)``, or of a query's largest term."""
    if isinstance(q, Logs):
        q = largest_is_one(q, state.top[..., None, :])
    return Sums(q @ state.kv, (q @ state.k[..., None])[..., 0])


def largest_is_one(q: Logs, unit: Tensor) -> Tensor:
    """Features of queries for keys in units ``e^unit``, each query's in those of its largest term."""
    terms = q.logs + unit
    return terms.sub_(terms.detach().amax(-1, keepdim=True)).exp_()


def prefixes(first: LinearState, kv: Tensor, k: Tensor, tops: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums up to before block 0, up to block 0, and so on (..., N + 1, C, Ev) and (..., N + 1, C), in units e^tops.

    ``tops`` (..., N + 1) is one for all features, (..., N + 1, C) one for each.
    """
    if tops is not None and tops.ndim == k.ndim:
        sums = torch.cat([first.kv[..., None, :, :], kv], -3), torch.cat([first.k[..., None, :], k], -2)
        both = state_sums(torch.cat([sums[0], sums[1][..., None]], -1).movedim(-2, -3), tops.mT).movedim(-3, -2)
        return both[..., :-1], both[..., -1]
    begin = torch.cat([first.kv.flatten(-2), first.k], -1)[..., None, :]
    sums = state_sums(torch.cat([begin, torch.cat([kv.flatten(-2), k], -1)], -2), tops)
    size = kv.shape[-2] * kv.shape[-1]
    return sums[..., :size].unflatten(-1, kv.shape[-2:]), sums[..., size:]
