"""The state of kernelised attention: sums over keys, which combine (a monoid), and what queries read from them.

Sums are unnormalised: ``phi(q_i) . phi(k_j) v_j`` (numerators) and ``phi(q_i) . phi(k_j)`` (denominators). Where keys
have logarithmic scales, a state is divided by ``e^log_scale``, one for all features or one for each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.decay import state_sums
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import traced
from fast_attention.feature_maps.feature_map import Features, Logs

SECTION = 2048  # keys of one product: a matrix product adds them one by one, and of a million would lose digits


class Factors(NamedTuple):
    """Features as ``values e^logs``: one logarithm for each token or feature. None stands for ones, and for zeros."""

    values: Float[Tensor, "*batch n C"] | None
    logs: Float[Tensor, "*batch n scales"] | None = None

    @property
    def shown(self) -> Tensor:
        """Values, or the logarithms where values are ones."""
        shown = self.logs if self.values is None else self.values
        assert shown is not None
        return shown

    def some(self, tokens: slice) -> Factors:
        """Select the features of some tokens."""
        return Factors(*(None if x is None else x[..., tokens, :] for x in self))


Kind = Tensor | Features | Logs | Factors


def factors(x: Kind) -> Factors:
    """The values and logarithms of features; those of a plain tensor have no logarithms."""
    match x:
        case Factors():
            return x
        case Logs():
            return Factors(None, x.logs)
        case Features():
            return Factors(x.values, None if x.log_scale is None else x.log_scale[..., None])
    return Factors(x)


def times(x: Tensor | None, factor: Tensor) -> Tensor:
    """``x factor`` in the dtype of ``x``; None stands for ones."""
    return factor if x is None else x * factor.to(x.dtype)


class LinearState(NamedTuple):
    """Sums over keys and values; the true ones are ``exp(log_scale)`` times ``kv`` and ``k``."""

    kv: Float[Tensor, "*batch C values"]  # sum_j phi(k_j) v_j^T
    k: Float[Tensor, "*batch C"]  # sum_j phi(k_j)
    log_scale: Float[Tensor, "*batch scales"]  # largest logarithm of each feature, or one for all; 0 without scales


class Sums(NamedTuple):
    """Numerators (..., L, Ev) and denominators (..., L) of the outputs, up to one factor per query."""

    numerator: Float[Tensor, "*batch length values"]
    denominator: Float[Tensor, "*batch length"]


def empty(keys: Kind, v: Tensor) -> LinearState:
    """The state before the first key."""
    keys = factors(keys)
    k = torch.zeros_like(keys.shown[..., 0, :])
    log_scale = k[..., :1] if keys.logs is None else torch.full_like(keys.logs[..., 0, :], FLOOR)
    return LinearState(k.new_zeros((*k.shape, v.shape[-1])), k, log_scale)


def summarise(keys: Kind, v: Tensor) -> LinearState:
    """The state after keys (..., S, C) and values (..., S, Ev)."""
    values, log_scale = scaled(keys)
    return LinearState(_products(values, v), values.sum(-2), log_scale)


def _products(k: Tensor, v: Tensor) -> Tensor:
    """``k^T v``, in sections whose products are added pair by pair."""
    whole = 0 if traced() or k.shape[-2] <= SECTION else k.shape[-2] // SECTION * SECTION
    if whole == 0:
        return k.mT @ v
    sections, values = (x[..., :whole, :].unflatten(-2, (-1, SECTION)) for x in (k, v))
    return (sections.mT @ values).sum(-3) + k[..., whole:, :].mT @ v[..., whole:, :]


def scaled(keys: Kind) -> tuple[Tensor, Tensor]:
    """Features of keys over ``e^log_scale``, the largest of all keys, and these log scales, as a state has them."""
    values, logs = factors(keys)
    if logs is None:
        assert values is not None
        return values, torch.zeros_like(values[..., 0, :1])
    log_scale = logs.detach().amax(-2).clamp_min(FLOOR)
    return times(values, (logs - log_scale[..., None, :]).exp_()), log_scale


def combine(earlier: LinearState, later: LinearState) -> LinearState:
    """The state of two neighbouring chunks; associative."""
    log_scale = torch.maximum(earlier.log_scale, later.log_scale)
    a, b = (earlier.log_scale - log_scale).exp(), (later.log_scale - log_scale).exp()
    kv = a[..., None] * earlier.kv + b[..., None] * later.kv
    return LinearState(kv, a * earlier.k + b * later.k, log_scale)


def read(q: Kind, state: LinearState) -> Sums:
    """Sums of queries over all of a state, divided by ``exp(state.log_scale)``, or by a query's largest term."""
    q = largest_is_one(q, state.log_scale[..., None, :])
    return Sums(q @ state.kv, (q @ state.k[..., None])[..., 0])


def largest_is_one(q: Kind, log_scale: Tensor) -> Tensor:
    """Features of queries for keys divided by ``e^log_scale``; with logarithms each query's over its largest term."""
    values, logs = factors(q)
    if logs is None:
        assert values is not None
        return values
    terms = logs + log_scale
    return times(values, terms.sub_(terms.detach().amax(-1, keepdim=True)).exp_())


def normalise(sums: Sums, eps: float = 0.0) -> Float[Tensor, "*batch length values"]:
    """Numerators over denominators plus ``eps``; zeros where that is zero, or too small for a quotient to mean much."""
    denominator = sums.denominator + eps if eps else sums.denominator
    info = torch.finfo(denominator.dtype)
    nothing = denominator.abs() < info.tiny / info.eps
    quotient = sums.numerator / denominator.masked_fill(nothing, 1.0)[..., None]
    return quotient.masked_fill(nothing[..., None], 0.0)


def prefixes(first: LinearState, kv: Tensor, k: Tensor, log_scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums before chunk 0, up to chunk 0, and so on: (..., N + 1, C, Ev) and (..., N + 1, C), over e^log_scales.

    ``log_scales`` (..., N + 1, 1) is one for all features, (..., N + 1, C) one for each.
    """
    if log_scales is not None and log_scales.shape[-1] > 1:
        sums = torch.cat([first.kv[..., None, :, :], kv], -3), torch.cat([first.k[..., None, :], k], -2)
        row = state_sums(torch.cat([sums[0], sums[1][..., None]], -1).movedim(-2, -3), log_scales.mT).movedim(-3, -2)
        return row[..., :-1], row[..., -1]
    begin = torch.cat([first.kv.flatten(-2), first.k], -1)[..., None, :]
    sums = state_sums(
        torch.cat([begin, torch.cat([kv.flatten(-2), k], -1)], -2), None if log_scales is None else log_scales[..., 0]
    )
    size = kv.shape[-2] * kv.shape[-1]
    return sums[..., :size].unflatten(-1, kv.shape[-2:]), sums[..., size:]
