"""Runs methods that take many new tokens chunk by chunk: neither features nor gradients of all tokens are held.

For mechanisms with a state of constant size whose sums have no gradient written by hand: any split of a sequence gives
the same outputs, so that the state before a chunk is all that the chunk's gradient needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fast_attention.engine import operation, trace
from fast_attention.engine.chunked import scan

Method = TypeVar("Method", bound=Callable[..., Any])
LEAST = 512  # tokens of a chunk: shorter ones have more operations than they save memory
NUMBERS = 2**21  # of all values, from which on what is saved pays for computing all but the sums twice
SEVERAL = 4  # chunks at least


def in_chunks(advance: Method) -> Method:
    """An ``advance(q, k, v, w, state, key_mask=...)`` that walks through chunks of many new tokens."""

    @functools.wraps(advance)
    def walked(
        self: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, state: Any, *, key_mask: Tensor | None
    ) -> tuple[Tensor, Any]:  # fmt: skip
        size = _size(self, q, k, v)
        if not size:
            return advance(self, q, k, v, w, state, key_mask=key_mask)
        weights, layout = tree_flatten(w)
        numbers, fields = tree_flatten(_before(self, k, v, w) if state is None else state)

        def step(tokens: Sequence[Any], weights: Sequence[Any], before: tuple[Tensor, ...]) -> Any:
            *heads, mask = tokens
            out, after = advance(
                self, *heads, tree_unflatten(weights, layout), tree_unflatten(before, fields), key_mask=_row(mask)
            )  # fmt: skip
            return (out,), tuple(tree_flatten(after)[0])

        (out,), numbers = scan(step, [q, k, v, _column(key_mask)], weights, tuple(numbers), size=size)
        return out, tree_unflatten(numbers, fields)

    return cast("Method", walked)


def summed_in_chunks(summarise_keys: Method) -> Method:
    """A ``summarise_keys(k, v, w, key_mask=...)`` that merges the states of chunks."""

    @functools.wraps(summarise_keys)
    def walked(self: Any, k: Tensor, v: Tensor, w: Any, *, key_mask: Tensor | None = None) -> Any:
        size = _size(self, k, v)
        if not size:
            return summarise_keys(self, k, v, w, key_mask=key_mask)
        weights, layout = tree_flatten(w)
        numbers, fields = tree_flatten(_before(self, k, v, w))

        def step(tokens: Sequence[Any], weights: Sequence[Any], before: tuple[Tensor, ...]) -> Any:
            k, v, mask = tokens
            later = summarise_keys(self, k, v, tree_unflatten(weights, layout), key_mask=_row(mask))
            return (), tuple(tree_flatten(self.merge_states(tree_unflatten(before, fields), later))[0])

        return tree_unflatten(scan(step, [k, v, _column(key_mask)], weights, tuple(numbers), size=size)[1], fields)

    return cast("Method", walked)


def worthwhile(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a causal call is to go by an ``advance`` that walks through chunks: as many queries as keys, many."""
    return not operation.unsupported_reason(q, k, v) and q.shape[-2] == k.shape[-2] and _chunk(v) > 0


def _size(mechanism: Any, *tokens: Tensor) -> int:
    """Tokens of a chunk, so that states and one chunk's features take about as much; 0 where all are one."""
    constant = mechanism.traits.memory == "constant"
    if not constant or operation.unsupported_reason(*tokens) or not (size := _chunk(tokens[-1])):
        return 0
    trace.record("chunk by chunk, with a running state", "many new tokens", chunk=size)
    return size


def _chunk(v: Tensor) -> int:
    size = max(LEAST, math.isqrt(v.shape[-2] * v.shape[-1]))
    return size if v.numel() >= NUMBERS and v.shape[-2] >= SEVERAL * size else 0


def _before(self: Any, k: Tensor, v: Tensor, w: Any) -> Any:
    """The state before the first key: that of one that nobody may see."""
    unseen = torch.zeros(*k.shape[:-3], 1, 1, dtype=torch.bool, device=k.device)
    with torch.no_grad():
        return self.summarise_keys(k[..., :1, :], v[..., :1, :], w, key_mask=unseen)


def _column(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask[..., None]


def _row(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[..., 0]
