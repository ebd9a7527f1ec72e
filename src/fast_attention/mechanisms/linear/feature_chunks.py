"""Kernelised attention with any feature map, chunk after chunk: features of a chunk are made where they are read.

Maps may be trained, or be a user's own: autograd follows them through one chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import operation, trace
from fast_attention.engine.chunked import Step, scan
from fast_attention.feature_maps.feature_map import Features, Logs, Map
from fast_attention.mechanisms.linear import in_range, linear_state, reference
from fast_attention.mechanisms.linear.linear_state import LinearState

Maps = Callable[..., tuple[Map, Map]]  # weights -> the maps of queries and of keys
NUMBERS = 2**21  # features of a chunk, all rows together
LEAST = 256  # tokens of a chunk: shorter ones have more operations than they save memory
SEVERAL = 4  # chunks from which on the memory that is saved pays for making features twice


def feature_attention(
    maps: Maps, weights: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_mask: Tensor | None,
    eps: float = 0.0, because: str | None = "",
) -> Tensor:  # fmt: skip
    """Attention with weights ``phi_q(q_i) . phi_k(k_j)`` for any two maps made of ``weights``, by the path that suits.

    Outputs (..., L, Ev) over the keys that each query may see; causal ones aligned to the bottom right. ``because``:
    why no faster form serves, or None where that was recorded.
    """
    why = against(maps, weights, q, k, v)
    if because is not None:
        trace.record(*_named(why, because))
    if why:
        queries, keys = maps(*weights)
        keys = reference.masked_keys(keys, k, key_mask)
        return in_range.attend(queries(q), keys, v, is_causal=is_causal, eps=eps)
    return _attend(maps, weights, q, k, v, is_causal=is_causal, key_mask=key_mask, eps=eps)


def path(maps: Maps, weights: Sequence[Any], q: Tensor, k: Tensor, v: Tensor) -> str:
    """Path of ``feature_attention`` for this call, as ``explain`` has it."""
    return _named(against(maps, weights, q, k, v), "")[0]


def _named(why: str, because: str) -> tuple[str, str]:
    if why:
        return "features, then two products", because or why
    why = "autograd follows any map through one chunk at a time"
    return "features chunk by chunk, with a running state", because or why


def against(
    maps: Maps, weights: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, *, numbers: int = SEVERAL * NUMBERS
) -> str:
    """Why chunks would not do; empty where they do, from as many features of all tokens on as ``numbers``."""
    if why := operation.unsupported_reason(q, k, v, even=True):
        return why
    if min(q.shape[-2], k.shape[-2]) < SEVERAL * LEAST:
        return f"fewer than {SEVERAL * LEAST} tokens"
    with torch.no_grad():
        features = maps(*weights)[1](k[..., :1, :])[0].numel()
    return "" if min(q.shape[-2], k.shape[-2]) * features >= numbers else "features of all tokens fit"


def _attend(
    maps: Maps, weights: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_mask: Tensor | None,
    eps: float,
) -> Tensor:  # fmt: skip
    mask = None if key_mask is None else key_mask.expand(k.shape[:-1])[..., None]
    with torch.no_grad():
        one = maps(*weights)[1](k[..., :1, :])
        before = linear_state.empty(one, v)
    size = max(LEAST, NUMBERS // one[0].numel(), math.isqrt(k.shape[-2] * v.shape[-1]))
    extra = k.shape[-2] - q.shape[-2] if is_causal else k.shape[-2]
    if extra < 0:  # the first queries see nothing
        out = _attend(maps, weights, q[..., -extra:, :], k, v, is_causal=True, key_mask=key_mask, eps=eps)
        return F.pad(out, (0, 0, -extra, 0))
    state: tuple[Tensor, ...] = before
    if extra > 0:  # every query sees the first keys
        first = [x if x is None else x[..., :extra, :] for x in (k, v, mask)]
        state = scan(_summarise(maps), first, weights, state, size=size)[1]
    if not is_causal:
        return scan(_read(maps, len(weights), eps), [q], [*weights, *state], (), size=size)[0][0]
    rest = [x if x is None else x[..., extra:, :] for x in (k, v, mask)]
    return scan(_causal(maps, eps), [q, *rest], weights, state, size=size)[0][0]


def _keys(phi: Map, k: Tensor, mask: Tensor | None) -> Features | Logs:
    return reference.masked_keys(phi, k, None if mask is None else mask[..., 0])


def _summarise(maps: Maps) -> Step:
    def step(tokens: Sequence[Any], weights: Sequence[Any], state: tuple[Tensor, ...]) -> Any:
        k, v, mask = tokens
        later = in_range.summarise(_keys(maps(*weights)[1], k, mask), v)
        return (), tuple(linear_state.combine(LinearState(*state), later))

    return step


def _read(maps: Maps, count: int, eps: float) -> Step:
    def step(tokens: Sequence[Any], weights: Sequence[Any], state: tuple[Tensor, ...]) -> Any:
        queries, sums = maps(*weights[:count])[0](tokens[0]), LinearState(*weights[count:])
        return (in_range.read(queries, sums, eps=eps),), ()

    return step


def _causal(maps: Maps, eps: float) -> Step:
    def step(tokens: Sequence[Any], weights: Sequence[Any], state: tuple[Tensor, ...]) -> Any:
        q, k, v, mask = tokens
        queries, keys = maps(*weights)
        out, after = in_range.advance(queries(q), _keys(keys, k, mask), v, LinearState(*state), eps=eps)
        return (out,), tuple(after)

    return step
