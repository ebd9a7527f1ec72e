"""Linear attention's operations: the compiled core, kernels for GPUs, or plain sums.

Both take the tensors of ``compiled.Inputs``; ``number`` says what features are made of tokens (``core_map``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import trace
from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.precision import widen
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import Map
from fast_attention.feature_maps.features import Identity
from fast_attention.mechanisms.linear import compiled, gpu, reference
from fast_attention.mechanisms.linear.compiled import Inputs
from fast_attention.mechanisms.linear.core_map import EXPONENTIAL, NUMBERS, CoreMap
from fast_attention.mechanisms.linear.linear_state import LinearState, empty

PLAIN = CoreMap(NUMBERS[Identity])  # features that are made outside
SCALED = "every key has a scale of its own"


def _features(q: Tensor, k: Tensor, key_mask: Tensor | None, maps: tuple[Map, Map]) -> tuple[Any, Any]:
    """Features of queries and of keys."""
    return maps[0](q), reference.masked_keys(maps[1], k, key_mask)


def attended_sums(
    *tensors: Any, number: int, offset: float, eps: float, is_causal: bool, normalize: bool = True
) -> Tensor:
    """``phi(q_i)^T S / (phi(q_i)^T z + eps)``, ``S`` and ``z`` over the keys that query i may see; zeros for none."""
    x = Inputs(*tensors)
    queries, keys = _features(x.q, x.k, x.key_mask, CoreMap(number, offset, *x[4:7]).maps())
    settings: Any = {"is_causal": is_causal, "eps": eps, "normalize": normalize}
    return reference.attention(queries, keys, x.v, None, x.log_decay, **settings)[0]


def advanced_sums(
    *tensors: Any, number: int, offset: float, eps: float, is_causal: bool, normalize: bool = True
) -> tuple[Tensor, ...]:
    """Causal outputs of new tokens behind a state, and the three tensors of the state after them."""
    x = Inputs(*tensors)
    queries, keys = _features(x.q, x.k, x.key_mask, CoreMap(number, offset, *x[4:7]).maps())
    state = empty(keys, x.v) if x.kv is None else LinearState(*tensors[7:10])
    out, after = reference.attention(queries, keys, x.v, state, x.log_decay, eps=eps, normalize=normalize)
    return out, *after  # type: ignore[misc]


def _advances(*tensors: Any, number: int, **settings: Any) -> str:
    """Why the core does not go on from a state; random features have scales there too."""
    scaled = number < EXPONENTIAL and tensors[9] is not None and bool(tensors[9].any())
    return compiled.advances(*tensors) or ("large keys that need rescaling" if scaled else "")


attend = Operation(
    attended_sums,
    cpu=Fast(
        compiled.forward, compiled.backward, serves=compiled.serves, even=3, halves=True, path=compiled.PATH,
        why=compiled.why, sizes=compiled.sizes,
    ),
    cuda=Fast(gpu.attend, None, serves=gpu.serves, halves=True),
    compute=torch.float32,
    empty=like_queries,
    path="plain sums",
)  # fmt: skip
advance = Operation(
    advanced_sums,
    cpu=Fast(
        partial(compiled.forward, advances=True), partial(compiled.backward, advances=True), serves=_advances, even=3,
        halves=True, path=compiled.PATH, why="behind a state", sizes=compiled.sizes,
    ),
    cuda=Fast(gpu.advance, None, serves=gpu.advances, halves=True),
    compute=torch.float32,
    path="plain sums",
    sizes=lambda *tensors, **settings: {"chunk": reference.CHUNK},
)  # fmt: skip


def of_map(
    core_map: CoreMap, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, log_decay: Tensor | None = None, *,
    eps: float = 0.0, is_causal: bool, normalize: bool = True,
) -> Tensor:  # fmt: skip
    """Attention by features that the operation makes; sums decay by ``log_decay`` (..., L, 1), or (..., L, C)."""
    rows = core_map.rows
    if rows is not None and not symbolic() and rows.shape[:-2] != q.shape[-rows.ndim : -2]:
        batch_shape = torch.broadcast_shapes(q.shape[:-2], rows.shape[:-2])
        q, k, v = (x.expand(*batch_shape, -1, -1) for x in (q, k, v))
    of_rows = () if rows is None else widen(tuple(core_map[2:]))
    decays = () if log_decay is None else (*[None] * 6, log_decay)
    settings: Any = {**core_map.settings, "eps": float(eps), "is_causal": is_causal, "normalize": normalize}
    return attend(q, k, v, key_mask, *of_rows, *decays, **settings)


def of_features(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, maps: tuple[Map, Map], *, eps: float = 0.0,
    is_causal: bool,
) -> Tensor:  # fmt: skip
    """Attention with weights ``phi_q(q_i) . phi_k(k_j)`` by maps of queries and of keys that are made here."""
    queries, keys = _features(q, k, key_mask, maps)
    if keys.log_scale is not None:
        trace.record("plain sums", SCALED)
        return reference.attention(queries, keys, v, eps=eps, is_causal=is_causal)[0]
    return of_map(PLAIN, queries.values, keys.values, v, None, eps=eps, is_causal=is_causal)


def advance_map(
    core_map: CoreMap, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Any,
    log_decay: Tensor | None = None, *, eps: float = 0.0, normalize: bool = True,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """``of_map`` for new tokens behind the sums of ``state``, and the sums after them."""
    before, of_rows = (None, None, None) if state is None else state[:3], widen(tuple(core_map[2:]))
    decays = () if log_decay is None else (log_decay,)
    settings: Any = {**core_map.settings, "eps": float(eps), "is_causal": True, "normalize": normalize}
    out, *after = advance(q, k, v, key_mask, *of_rows, *before, *decays, **settings)
    return out, LinearState(*after)


def advance_features(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, maps: tuple[Map, Map], state: LinearState | None, *,
    eps: float = 0.0,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """``of_features`` for new tokens behind a state, and the state after them."""
    queries, keys = _features(q, k, key_mask, maps)
    if keys.log_scale is not None:
        trace.record("plain sums", SCALED, chunk=reference.CHUNK)
        state = empty(keys, v) if state is None else state
        return reference.attention(queries, keys, v, state, eps=eps)  # type: ignore[return-value]
    return advance_map(PLAIN, queries.values, keys.values, v, None, state, eps=eps)
