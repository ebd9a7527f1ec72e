"""Linear attention by the path that suits the call: the compiled core, or plain sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import trace
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap, Features
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu
from fast_attention.mechanisms.linear import compiled, feature_chunks, in_range, reference
from fast_attention.mechanisms.linear.compiled import OutOfRangeError
from fast_attention.mechanisms.linear.linear_state import LinearState

MAPS = EluPlusOne(), Relu()  # one operation for compilers, whose graphs on disk hold numbers of this list
MANY = 2**28  # features, a GiB: below, products over all of them are faster than chunks of them
OVERFLOW = "outputs that are not finite in one scale"


def attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    """``phi(q_i)^T S / (phi(q_i)^T z + eps)``, ``S`` and ``z`` over the keys that query i may see; zeros for none."""
    if phi in MAPS:
        number = [phi == one for one in MAPS].index(True)
        return _known(q, k, v, key_mask, number=number, is_causal=is_causal, eps=float(eps))
    return _attend(q, k, v, key_mask, phi=phi, eps=eps, is_causal=is_causal)


@opaque(like_queries)
def _known(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, number: int, is_causal: bool, eps: float
) -> Tensor:
    return _attend(q, k, v, key_mask, phi=MAPS[number], eps=eps, is_causal=is_causal)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    settings: Any = {"eps": eps, "is_causal": is_causal}
    if type(phi) not in compiled.NUMBERS:
        return _mapped(q, k, v, key_mask, phi=phi, **settings)
    why = compiled.obstacle(q, k, v) or compiled.few(q, k, v)
    if not why:
        try:
            return compiled.attend(RULE, q, k, v, key_mask, None, None, None, map=phi, **settings)
        except OutOfRangeError:
            why = OVERFLOW
    trace.record("plain sums", why)
    return _plain_sums(q, k, v, key_mask, phi=phi, **settings)


@in_float32
def _mapped(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    """By features that are made here, of all tokens or chunk by chunk."""
    settings: Any = {"eps": eps, "is_causal": is_causal}

    def maps() -> Any:
        return phi.features, phi.features

    many = 4 * feature_chunks.NUMBERS if isinstance(phi, Elementwise) else MANY
    if not feature_chunks.against(maps, (), q, k, v, numbers=many):
        return feature_chunks.feature_attention(maps, (), q, k, v, key_mask=key_mask, **settings)
    keys, queries = reference.masked_keys(phi.features, k, key_mask), phi.features(q)
    why = (
        "every key has a scale of its own"
        if in_range.has_scale(keys)
        else compiled.obstacle(q, k, v) or compiled.few(q, k, v)
    )
    if not why:
        assert isinstance(queries, Features)
        assert isinstance(keys, Features)
        features = queries.values, keys.values, v, None
        try:
            return compiled.attend(RULE, *features, None, None, None, map=Identity(), **settings)
        except OutOfRangeError:
            why = OVERFLOW
    trace.record("plain sums", why)
    return in_range.attend(queries, keys, v, **settings)


@in_float32
def _plain_sums(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    keys = reference.masked_keys(phi.features, k, key_mask)
    return in_range.attend(phi.features(q), keys, v, is_causal=is_causal, eps=eps)


def advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState]:
    """Causal outputs of new tokens behind ``state``, and the state after them."""
    if type(phi) not in compiled.NUMBERS:
        return _mapped_advance(q, k, v, key_mask, state, phi=phi, eps=eps)
    taken = _taken(q, k, v, key_mask, state, phi=phi, eps=eps)
    return _plain_advance(q, k, v, key_mask, state, phi=phi, eps=eps) if taken is None else taken


def _taken(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState] | None:
    """``advance`` by the core; None where it cannot, which is recorded."""
    before = (None, None, None) if state is None else (*state[:2], None)
    why = compiled.obstacle(q, k, v, *before)
    if not why and state is not None and state.log_scale.count_nonzero().item() > 0:
        why = "large keys that need rescaling"
    if not why:
        try:
            out, kv, z, log_scale = compiled.advance(
                RULE, q, k, v, key_mask, None, None, None, *before, map=phi, eps=eps
            )
        except OutOfRangeError:
            why = OVERFLOW
        else:
            return out, LinearState(kv, z, log_scale[..., :1])
    trace.record("plain sums", why, chunk=reference.CHUNK)
    return None


@in_float32
def _mapped_advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState]:
    keys, queries = reference.masked_keys(phi.features, k, key_mask), phi.features(q)
    if in_range.has_scale(keys):
        trace.record("plain sums", "every key has a scale of its own", chunk=reference.CHUNK)
    else:
        assert isinstance(queries, Features)
        assert isinstance(keys, Features)
        taken = _taken(queries.values, keys.values, v, None, state, phi=Identity(), eps=eps)
        if taken is not None:
            return taken
    return in_range.advance(queries, keys, v, state, eps=eps)


@in_float32
def _plain_advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState]:
    keys = reference.masked_keys(phi.features, k, key_mask)
    return in_range.advance(phi.features(q), keys, v, state, eps=eps)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Tensor | None,
    map: FeatureMap, eps: float, is_causal: bool, advances: bool,
) -> Any:  # fmt: skip
    queries, keys = map.features(q), reference.masked_keys(map.features, k, key_mask)
    if not advances:
        return in_range.attend(queries, keys, v, is_causal=is_causal, eps=eps)
    kv, z = others[3:5]
    state = None if kv is None or z is None else LinearState(kv, z, torch.zeros_like(z[..., :1]))
    out, after = in_range.advance(queries, keys, v, state, eps=eps)
    return out, after.kv, after.k, torch.zeros_like(after.k)


RULE = compiled.rule(_plain)
