"""Linear attention's operations: the compiled core, kernels for GPUs, or plain sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import trace
from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.feature_map import FeatureMap
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu
from fast_attention.mechanisms.linear import compiled, gpu, in_range, reference
from fast_attention.mechanisms.linear.linear_state import LinearState

SCALED = "every key has a scale of its own"


def _map(number: int, offset: float) -> FeatureMap:
    return (EluPlusOne(), Relu(offset), Identity())[number]


def linear_sums(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, number: int, offset: float, eps: float, is_causal: bool
) -> Tensor:
    """``phi(q_i)^T S / (phi(q_i)^T z + eps)``, ``S`` and ``z`` over the keys that query i may see; zeros for none."""
    phi = _map(number, offset)
    keys = reference.masked_keys(phi.features, k, key_mask)
    return in_range.attend(phi.features(q), keys, v, is_causal=is_causal, eps=eps)


def further_sums(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: None, key_rows: None, bias: None,
    *state: Tensor | None, number: int, offset: float, eps: float, is_causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Causal outputs of new tokens behind a state, and the three tensors of the state after them."""
    phi, (kv, z, log_scale) = _map(number, offset), state
    before = None if kv is None or z is None or log_scale is None else LinearState(kv, z, log_scale)
    out, after = in_range.advance(phi.features(q), reference.masked_keys(phi.features, k, key_mask), v, before, eps=eps)
    return out, *after


def _rescaled(*tensors: Tensor | None, **settings: Any) -> str:
    """Why the core does not go on from a state."""
    return compiled.advances(*tensors) or (  # type: ignore[arg-type]
        "large keys that need rescaling" if tensors[9] is not None and bool(tensors[9].any()) else ""
    )


sums = Operation(
    linear_sums,
    cpu=Fast(
        compiled.forward, compiled.backward, serves=compiled.serves, even=3, halves=True, path=compiled.PATH,
        why=compiled.why, sizes=compiled.sizes,
    ),
    cuda=Fast(gpu.attend, None, serves=gpu.serves, halves=True),
    compute=torch.float32,
    empty=like_queries,
    path="plain sums",
)  # fmt: skip
further = Operation(
    further_sums,
    cpu=Fast(
        partial(compiled.forward, advances=True), partial(compiled.backward, advances=True), serves=_rescaled, even=3,
        halves=True, path=compiled.PATH, why="behind a state", sizes=compiled.sizes,
    ),
    cuda=Fast(gpu.further, None, serves=gpu.advances, halves=True),
    compute=torch.float32,
    path="plain sums",
    sizes=lambda *tensors, **settings: {"chunk": reference.CHUNK},
)  # fmt: skip


@in_float32
def mapped(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    """``sums`` by features that are made here."""
    keys = reference.masked_keys(phi.features, k, key_mask)
    return of_features(phi.features(q), keys, v, eps=eps, is_causal=is_causal)


def of_features(queries: Any, keys: Any, v: Tensor, *, eps: float = 0.0, is_causal: bool) -> Tensor:
    """Attention with weights ``queries_i . keys_j``."""
    if in_range.has_scale(keys):
        trace.record("plain sums", SCALED)
        return in_range.attend(queries, keys, v, eps=eps, is_causal=is_causal)
    return sums(queries.values, keys.values, v, None, **compiled.code(Identity()), eps=eps, is_causal=is_causal)


def advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState]:
    """Causal outputs of new tokens behind ``state``, and the state after them."""
    if type(phi) not in compiled.NUMBERS:
        return _mapped_advance(q, k, v, key_mask, state, phi=phi, eps=eps)
    before, settings = (None, None, None) if state is None else state, compiled.code(phi)
    out, kv, z, log_scale = further(q, k, v, key_mask, None, None, None, *before, eps=eps, is_causal=True, **settings)
    return out, LinearState(kv, z, log_scale[..., :1])


@in_float32
def _mapped_advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState]:
    return further_features(phi.features(q), reference.masked_keys(phi.features, k, key_mask), v, state, eps=eps)


def further_features(
    queries: Any, keys: Any, v: Tensor, state: LinearState | None, *, eps: float = 0.0
) -> tuple[Tensor, LinearState]:
    """``of_features`` for new tokens behind a state, and the state after them."""
    if in_range.has_scale(keys):
        trace.record("plain sums", SCALED, chunk=reference.CHUNK)
        return in_range.advance(queries, keys, v, state, eps=eps)
    return advance(queries.values, keys.values, v, None, state, phi=Identity(), eps=eps)
