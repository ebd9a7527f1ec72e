"""Kernelised attention without scales, brought to where no sum overflows: by powers of two, so that nothing is rounded.

The same four functions as in ``reference`` and ``linear_state``. Features with scales of their own are passed on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine import numerics
from fast_attention.feature_maps.feature_map import Features, Logs
from fast_attention.mechanisms.linear import linear_state, reference
from fast_attention.mechanisms.linear.linear_state import LinearState, Sums, normalise


def has_scale(keys: Features | Logs) -> bool:
    """Whether keys have logarithmic scales, so that no ``eps`` protects their sums, nor need it."""
    return isinstance(keys, Logs) or keys.log_scale is not None


def log_scale(keys: Features) -> Tensor:
    """The logarithm (..., 1) by which sums of these keys and many more do not overflow; 0 for ordinary ones."""
    return -numerics.factor(keys.values.flatten(-2), 2.0**20, rows=True).log()


def attend(queries: Features | Logs, keys: Features | Logs, v: Tensor, *, is_causal: bool, eps: float = 0.0) -> Tensor:
    """Outputs (..., L, Ev) of ``reference.attend``; rescaling changes no quotient."""
    if has_scale(keys):
        return normalise(reference.attend(queries.free, keys, v, is_causal=is_causal))
    assert isinstance(keys, Features)
    assert isinstance(queries, Features)
    less, smaller = numerics.factor(keys.values, 2.0**28), numerics.factor(v, 2.0**28)
    row = numerics.factor(queries.values, 2.0**40, rows=True)  # so much more than eps that it is no matter
    scaled = Features(keys.values * less), v * smaller
    sums = reference.attend(queries.values * row, *scaled, is_causal=is_causal)
    return normalise(Sums(sums.numerator, sums.denominator + eps * less)) / smaller


def advance(
    queries: Features | Logs, keys: Features | Logs, v: Tensor, state: LinearState | None, *, eps: float = 0.0
) -> tuple[Tensor, LinearState]:
    """Outputs of new tokens behind ``state``, and the state after them."""
    if has_scale(keys):
        sums, state = reference.advance(queries.free, keys, v, state)
        return normalise(sums), state
    assert isinstance(keys, Features)
    assert isinstance(queries, Features)
    before = linear_state.empty(keys, v) if state is None else state
    largest = torch.maximum(before.log_scale, log_scale(keys))
    rescale, factor = (before.log_scale - largest).exp(), (-largest).exp()
    before = LinearState(before.kv * rescale[..., None], before.k * rescale, largest)
    row = numerics.factor(queries.values, 1.0, rows=True)
    sums, state = reference.advance(queries.values * row, Features(keys.values * factor[..., None]), v, before)
    return normalise(Sums(sums.numerator, sums.denominator + eps * factor * row[..., 0])), state


def summarise(keys: Features | Logs, v: Tensor) -> LinearState:
    """The state after keys and values."""
    if has_scale(keys):
        return linear_state.summarise(keys, v)
    assert isinstance(keys, Features)
    largest = log_scale(keys)
    return linear_state.summarise(Features(keys.values * (-largest).exp()[..., None]), v)._replace(log_scale=largest)


def read(queries: Features | Logs, state: LinearState, *, eps: float = 0.0) -> Tensor:
    """Outputs of queries that see all of a state."""
    if isinstance(queries, Logs):
        return normalise(linear_state.read(queries, state))
    row = numerics.factor(queries.values, 1.0, rows=True)
    sums = linear_state.read(queries.values * row, state)
    return normalise(Sums(sums.numerator, sums.denominator + eps * (-state.log_scale).exp() * row[..., 0]))
