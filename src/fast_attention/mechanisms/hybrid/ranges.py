"""What the queries of one part of a sequence need of the rest: the range of keys that are near, sums of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fast_attention.engine import dispatch
from fast_attention.engine.blocks import smaller
from fast_attention.engine.chunked import State, scan
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanisms.hybrid.positions import BLOCK, CHUNK_TOKENS, SHORT, Plan
from fast_attention.mechanisms.linear import linear_state
from fast_attention.mechanisms.linear.kernelised import Kernelised
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.reference import masked_keys
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.local import Local


def near_range(near: Local | BlockLocal, queries: tuple[int, int], keys: int, *, is_causal: bool) -> tuple[int, int]:
    """The first of ``keys`` that some of the queries at these positions see through ``near``, and the end of them.

    Positions count keys: the first query's and the end; both results are the same where they see none.
    """
    first, end = queries
    if isinstance(near, BlockLocal):
        size = near.block_size
        low, high = (first // size - near.before) * size, ((end - 1) // size + near.after + 1) * size
    else:
        low, high = first - near.sides[0], end + near.sides[1]
    low = min(max(low if end > first else first, 0), keys)
    return low, max(min(end if is_causal or end == first else high, keys), low)


def plan_of(near: Local | BlockLocal, length: int, keys: int, start: int, *, is_causal: bool) -> Plan:
    """Where blocks lie for ``length`` queries from position ``start`` on; those of ``BlockLocal`` begin a block."""
    end, rest = start + length if symbolic() else max(start + length, 1), keys - start
    if isinstance(near, BlockLocal):
        size = near.block_size
        before, after = smaller(near.before, end // size), smaller(near.after, rest // size + 1)
        return Plan.of_blocks(length, size, before, after, is_causal, start)
    left, right = near.sides
    left, right = smaller(left, end - 1), smaller(right, rest - 1)
    if not symbolic() and start + length == keys <= SHORT:
        return Plan.dense(length, left, right, is_causal, start)
    return Plan.of(length, left, right, is_causal, start)


def far_state(
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    visible: Bool[Tensor, "*#batch keys"],
    far: Kernelised[Any],
    w: Any,
) -> LinearState:
    """The sums of the features of ``far`` over the visible of some keys; no features are kept for the gradient."""
    leaves, layout = tree_flatten(w)

    def features(weights: Sequence[Any], k: Tensor, visible: Tensor) -> Any:
        return masked_keys(far.per_token(tree_unflatten(list(weights), layout))[1], k, visible)

    def step(tokens: Sequence[Any], weights: Sequence[Any], state: State) -> tuple[tuple[Tensor, ...], State]:
        k, v, visible = tokens
        after = linear_state.summarise(features(weights, k, visible[..., 0]), v)
        return (), linear_state.combine(LinearState(*state), after)

    first, size = linear_state.empty(far.per_token(w)[1].first(k), v), max(CHUNK_TOKENS // v[..., 0, 0].numel(), BLOCK)
    tokens = [k, v, visible[..., None]]
    if dispatch.obstacle(k, v) or k.shape[-2] <= size:
        return LinearState(*step(tokens, leaves, first)[1])
    return LinearState(*scan(step, tokens, leaves, first, size=size)[1])
