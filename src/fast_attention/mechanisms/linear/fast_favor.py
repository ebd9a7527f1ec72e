"""Attention from random features by the path that suits the call: the compiled core, or plain sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import operation, trace
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32, widen
from fast_attention.feature_maps.feature_map import Map
from fast_attention.mechanisms.linear import compiled, favor_gpu, feature_chunks, gpu, reference
from fast_attention.mechanisms.linear.compiled import OutOfRangeError
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

POSITIVE = RandomFeatureMap("positive")


def attend(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Outputs (..., L, Ev) for queries (..., L, d), keys (..., S, d), values (..., S, Ev) and rows (..., m, d)."""
    settings: Any = {"is_causal": is_causal, "key_mask": key_mask}
    if why := favor_gpu.obstacle(phi, q, k, v, heads, masked=key_mask is not None):
        operation.unserved(q, why)
        if is_causal and phi.exponential:
            return _positive_causal(q, k, v, key_mask, *heads, hyperbolic=phi.pairs)
        return _attend(phi, q, k, v, heads, **settings)
    return favor_gpu.attend(phi, q, k, v, heads, **settings)


@opaque(like_queries)
def _positive_causal(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: Tensor, bias: Tensor | None,
    key_rows: Tensor | None, *, hyperbolic: bool,
) -> Tensor:  # fmt: skip
    """Sums that look at numbers, which a compiler would have feature by feature."""
    phi = RandomFeatureMap("hyperbolic" if hyperbolic else "positive")
    return _attend(phi, q, k, v, Heads(rows, bias, key_rows), is_causal=True, key_mask=key_mask)


def _attend(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """``attend`` without kernels for GPUs."""
    why = _against(phi, q, k, v, heads)
    if not (why := why or compiled.few(q, k, v)):
        try:
            given: Any = _shaped(phi, q, k, v, key_mask, heads)
            return compiled.attend(RULE, *given, map=None, eps=0.0, is_causal=is_causal)
        except OutOfRangeError:
            why = "outputs that are not finite"
    return _plain_sums(phi, q, k, v, heads, is_causal=is_causal, key_mask=key_mask, why=why)


@in_float32
def _plain_sums(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None,
    why: str,
) -> Tensor:  # fmt: skip
    def maps(*weights: Tensor | None) -> tuple[Map, Map]:
        some = Heads(*weights)  # type: ignore[arg-type]
        return (lambda x: phi.plain(x, some)), (lambda x: phi.plain(x, some.keys))

    return feature_chunks.feature_attention(
        maps, [*heads], q, k, v, is_causal=is_causal, key_mask=key_mask, because=why
    )


def _against(phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *state: Tensor) -> str:
    """Why the core would not do; empty where it does."""
    if phi.exponential:
        return compiled.obstacle(q, k, v, *widen(heads), *state)
    return operation.obstacle(q, k, v) or "features of either sign"


def _shaped(phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, heads: Heads) -> list[Any]:
    """Tokens for all heads, and rows of all features, as the core takes them."""
    lead = torch.broadcast_shapes(q.shape[:-2], heads.rows.shape[:-2])
    if lead != q.shape[:-2]:
        q, k, v = (x.expand(*lead, -1, -1) for x in (q, k, v))
    heads = widen(heads)
    rows, key_rows = (
        None if x is None else torch.cat([x, -x], -2) if phi.pairs else x for x in (heads.rows, heads.key_rows)
    )
    return [q, k, v, key_mask, rows, rows if key_rows is None else key_rows, heads.bias]


def advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Causal outputs of new tokens behind ``state``, and the state after them."""
    if why := favor_gpu.obstacle(phi, q, k, v, heads, masked=key_mask is not None) or gpu.few(q, k, v, state, *heads):
        operation.unserved(q, why)
        return _advance(phi, q, k, v, heads, state, key_mask)
    return favor_gpu.advance(phi, q, k, v, heads, state, key_mask)


def _advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """``advance`` without kernels for GPUs."""
    why = _against(phi, q, k, v, heads, *(state or ()))
    if not why:
        before = (None, None, None) if state is None else tuple(state)
        try:
            out, *after = compiled.advance(RULE, *_shaped(phi, q, k, v, key_mask, heads), *before, map=None, eps=0.0)
        except OutOfRangeError:
            why = "outputs that are not finite"
        else:
            return out, LinearState(*after)
    trace.record("plain sums", why)
    return _plain_advance(phi, q, k, v, heads, state, key_mask)


@in_float32
def _plain_advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, key_mask)
    sums, state = reference.advance(phi.plain(q, heads).free, keys, v, state)
    return normalise(sums), state


def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: Any, key_rows: Any, bias: Tensor | None,
    *before: Tensor | None, map: None, eps: float, is_causal: bool, advances: bool,
) -> Any:  # fmt: skip
    heads = Heads(rows, bias, key_rows)
    if advances:
        state = None if before[0] is None else LinearState(*before)  # type: ignore[arg-type]
        out, after = _plain_advance(POSITIVE, q, k, v, heads, state, key_mask)
        return out, *after
    keys = reference.masked_keys(lambda x: POSITIVE.plain(x, heads.keys), k, key_mask)
    return normalise(reference.attend(POSITIVE.plain(q, heads).free, keys, v, is_causal=is_causal))


RULE = compiled.rule(_plain)
