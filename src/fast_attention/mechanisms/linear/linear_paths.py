"""Kernelised attention by the path that suits the call: a few products, blocks in cache, or the plain form."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch, overflow
from fast_attention.engine.tracing import traced
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap, Features, Logs
from fast_attention.feature_maps.features import Identity
from fast_attention.mechanisms.linear import linear, linear_causal, linear_short, linear_whole
from fast_attention.mechanisms.linear.linear import LinearState, Sums
from fast_attention.mechanisms.linear.linear_blocks import protected

PAIRS = 64  # tokens up to which all pairs cost no more than a state
SHORT = 256  # tokens up to which chunks, causal, have more operations than they save work


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Tensor | None,
    *,
    phi: FeatureMap,
    eps: float,
    is_causal: bool,
) -> Float[Tensor, "*batch length values"]:
    """``phi(q_i)^T S / (phi(q_i)^T z + eps)``, ``S`` and ``z`` over the keys that query i may see; zeros for none."""
    if not _direct_passes(q, k, v):
        dispatch.record("plain sums", "traced, or not on a CPU")
        return _within_room(q, k, v, key_mask, phi=phi, eps=eps, is_causal=is_causal)
    out = _direct(q, k, v, key_mask, phi=phi, eps=eps, is_causal=is_causal)
    return out if overflow.finite(out) else _within_room(q, k, v, key_mask, phi=phi, eps=eps, is_causal=is_causal)


def _within_room(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    """The plain form, brought down to where no sum overflows."""
    return plain(phi.features(q), linear.masked_keys(phi.features, k, key_mask), v, is_causal=is_causal, eps=eps)


def plain(queries: Features | Logs, keys: Features | Logs, v: Tensor, *, is_causal: bool, eps: float = 0.0) -> Tensor:
    """The plain form, of features without units brought down to where no sum overflows: quotients do not change."""
    if _scaled(keys):
        return linear.normalise(linear.attend(queries.free, keys, v, is_causal=is_causal))
    assert isinstance(keys, Features)
    assert isinstance(queries, Features)
    less, smaller = overflow.factor(keys.values, 2.0**28), overflow.factor(v, 2.0**28)
    q = queries.values * overflow.factor(
        queries.values, 2.0**40, rows=True
    )  # so much more than eps that it is no matter
    sums = linear.attend(q, Features(keys.values * less), v * smaller, is_causal=is_causal)
    return linear.normalise(Sums(sums.numerator, sums.denominator + eps * less)) / smaller


def _direct(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    if not isinstance(phi, Elementwise):
        keys, queries = linear.masked_keys(phi.features, k, key_mask), phi.features(q)
        if _scaled(keys):
            dispatch.record("plain sums", "every key has a scale of its own", chunk=linear.CHUNK)
            return linear.normalise(linear.attend(queries.free, keys, v, is_causal=is_causal))
        assert isinstance(keys, Features)
        assert isinstance(queries, Features)
        q, k, key_mask, phi = queries.values, keys.values, None, Identity()
    length, extra = q.shape[-2], k.shape[-2] - q.shape[-2]
    few = SHORT if is_causal else PAIRS
    if max(length, length + extra) <= few:
        dispatch.record("all pairs at once", f"no more than {few} tokens")
        return linear_short.attention(q, k, v, key_mask, phi=phi, eps=eps, is_causal=is_causal)
    if not is_causal:
        dispatch.record("one state, blocks in cache", "every query sees every key", chunk=linear_whole.CHUNK)
        return linear_whole.attention(q, k, v, key_mask, phi=phi, eps=eps)
    dispatch.record("chunked causal sums, blocks in cache", "causal", chunk=linear_causal.CHUNK)
    if extra < 0:  # the first queries see nothing
        out = _direct(q[..., -extra:, :], k, v, key_mask, phi=phi, eps=eps, is_causal=True)
        return F.pad(out, (0, 0, -extra, 0))
    state = None, None
    if extra > 0:  # every query sees the first keys
        first = linear.masked_keys(phi.features, k[..., :extra, :], None if key_mask is None else key_mask[..., :extra])
        state = linear.summarise(first, v[..., :extra, :])[:2]
        k, v, key_mask = k[..., extra:, :], v[..., extra:, :], None if key_mask is None else key_mask[..., extra:]
    return linear_causal.attention(q, k, v, key_mask, *state, phi=phi, eps=eps)[0]


def advance(
    q: Float[Tensor, "*batch n width"],
    k: Float[Tensor, "*batch n width"],
    v: Float[Tensor, "*batch n values"],
    key_mask: Tensor | None,
    state: LinearState | None,
    *,
    phi: FeatureMap,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """Outputs of a stretch that follows ``state``, and the state after it."""
    if _direct_passes(q, k, v) and (state is None or state.top.count_nonzero().item() == 0):
        out, after = _advance(q, k, v, key_mask, state, phi=phi, eps=eps)
        if overflow.finite(out):
            return out, after
    dispatch.record("plain sums", "traced, not on a CPU, or in units of large keys", chunk=linear.CHUNK)
    return streamed(phi.features(q), linear.masked_keys(phi.features, k, key_mask), v, state, eps=eps)


def _advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState]:
    length = q.shape[-2]
    if length <= SHORT or not isinstance(phi, Elementwise):
        keys, queries = linear.masked_keys(lambda x: _features(phi, x), k, key_mask), _features(phi, q)
        if _scaled(keys):
            dispatch.record("plain sums", "every key has a scale of its own", chunk=linear.CHUNK)
            return streamed(queries, keys, v, state)
        assert isinstance(keys, Features)
        assert isinstance(queries, Features)
        if length <= SHORT:
            dispatch.record("one masked product", f"no more than {SHORT} tokens")
            sums, state = linear_short.advance(queries.values, keys.values, v, state)
            return _quotient(sums, eps, phi, queries.values), state
        q, k, key_mask, phi = queries.values, keys.values, None, Identity()
    dispatch.record("chunked causal sums, blocks in cache", "a long stretch", chunk=linear_causal.CHUNK)
    kv, z = (None, None) if state is None else state[:2]
    out, kv, z = linear_causal.attention(q, k, v, key_mask, kv, z, phi=phi, eps=eps)
    return out, LinearState(kv, z, torch.zeros_like(z[..., :1]))


def streamed(
    queries: Features | Logs, keys: Features | Logs, v: Tensor, state: LinearState | None, *, eps: float = 0.0
) -> tuple[Tensor, LinearState]:
    """Outputs of a stretch behind ``state``, and the state after it: plain sums, in units in which none overflows."""
    if _scaled(keys):
        sums, state = linear.advance(queries.free, keys, v, state)
        return linear.normalise(sums), state
    assert isinstance(keys, Features)
    assert isinstance(queries, Features)
    before = linear.empty(keys, v) if state is None else state
    top = torch.maximum(before.top, log_unit(keys))
    fading, unit = (before.top - top).exp(), (-top).exp()
    before = LinearState(before.kv * fading[..., None], before.k * fading, top)
    less = overflow.factor(queries.values, 1.0, rows=True)
    sums, state = linear.advance(queries.values * less, Features(keys.values * unit[..., None]), v, before)
    return linear.normalise(Sums(sums.numerator, sums.denominator + eps * unit * less[..., 0])), state


def summarise(keys: Features | Logs, v: Tensor) -> LinearState:
    """The state after a stretch of keys and values, in units in which no sum overflows."""
    if _scaled(keys):
        return linear.summarise(keys, v)
    assert isinstance(keys, Features)
    top = log_unit(keys)
    return linear.summarise(Features(keys.values * (-top).exp()[..., None]), v)._replace(top=top)


def found(queries: Features | Logs, state: LinearState, *, eps: float = 0.0) -> Tensor:
    """Outputs of queries that see all of a state, in units in which no sum overflows."""
    if isinstance(queries, Logs):
        return linear.normalise(linear.read(queries, state))
    less = overflow.factor(queries.values, 1.0, rows=True)
    sums = linear.read(queries.values * less, state)
    return linear.normalise(Sums(sums.numerator, sums.denominator + eps * (-state.top).exp() * less[..., 0]))


def log_unit(keys: Features) -> Tensor:
    """The logarithm (..., 1) of a unit in which a stretch of keys and many more have room; 0 for ordinary ones."""
    return -overflow.factor(keys.values.flatten(-2), 2.0**20, rows=True).log()


def _direct_passes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if traced():
        return False
    same = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.dtype == k.dtype == v.dtype
    return same and q.device.type == "cpu" and min(q.numel(), k.numel(), v.numel()) > 0


def _scaled(keys: Features | Logs) -> bool:
    """Whether keys have units, so that no ``eps`` protects their sums, nor need it."""
    return isinstance(keys, Logs) or keys.log_scale is not None


def _features(phi: FeatureMap, x: Tensor) -> Features | Logs:
    """``phi.features(x)``, in place where no gradient is asked for."""
    if traced() or not isinstance(phi, Elementwise) or (x.requires_grad and torch.is_grad_enabled()):
        return phi.features(x)
    made = torch.empty_like(x)
    phi.fill(x, made, torch.empty_like(x))
    return Features(made)


def _quotient(sums: Sums, eps: float, phi: FeatureMap, q: Tensor) -> Tensor:
    out = linear_short.quotient(sums, eps, safe=protected(phi, eps))
    return out.view(*q.shape[:-1], out.shape[-1])
