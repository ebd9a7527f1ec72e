"""Long sequences in chunks that hand on a state: neither features nor gradients of all tokens are held.

A family writes one function of a chunk, ``step``; decoding, prefill and training are that function. Beside inputs and
outputs nothing is saved but the state before every chunk, and the backward pass runs each chunk again with autograd.

``in_chunks`` serves mechanisms with a state of constant size whose sums have no gradient written by hand: any split of
a sequence gives the same outputs, so that the state before a chunk is all that the chunk's gradient needs.
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
from fast_attention.engine.chunks import chunks_of
from fast_attention.engine.operation import Fast, Operation, Tensors

Method = TypeVar("Method", bound=Callable[..., Any])
LEAST = 512  # tokens of a chunk: shorter ones have more operations than they save memory
NUMBERS = 2**21  # of all values, from which on what is saved pays for computing all but the sums twice
SEVERAL = 4  # chunks at least
Rows = tuple[Tensor, ...]
# (tokens of a chunk, weights, state before it) -> (rows of the output, or none; state after it)
Step = Callable[[Sequence[Any], Any, Any], tuple[Rows, Any]]


def scan(step: Step, tokens: Sequence[Tensor | None], weights: Any, state: Any, *, size: int) -> tuple[Rows, Any]:
    """``step`` over chunks of ``size`` tokens, first to last: all rows, and the state after the last chunk.

    Args:
        step: What one chunk does. Where it holds parameters of its own, which autograd would not find through chunks,
            the whole sequence is one.
        tokens: Tensors (..., L, E) that are split along L; None and booleans have no gradient.
        weights: Tensors, or None, that every chunk uses, in containers of any layout.
        state: The state before the first chunk: tensors, in containers of any layout.
        size: Tokens of a chunk.
    """
    (fixed, layout), (numbers, fields) = tree_flatten(weights), tree_flatten(state)

    def flattened(tokens: Sequence[Any], weights: Sequence[Any], before: Rows) -> tuple[Rows, Rows]:
        rows, after = step(tokens, tree_unflatten(weights, layout), tree_unflatten(before, fields))
        return rows, tuple(tree_flatten(after)[0])

    run = _RULE if _closed(flattened, tokens, fixed, tuple(numbers)) else _plain
    results = run(*tokens, *fixed, *numbers, step=flattened, counts=(len(tokens), len(fixed)), size=size)
    rows = len(results) - len(numbers)
    return results[:rows], tree_unflatten(results[rows:], fields)


def _closed(step: Step, tokens: Sequence[Any], weights: Sequence[Any], state: Rows) -> bool:
    """Whether a step of one token has no gradient but those of its arguments."""
    if not torch.is_grad_enabled():
        return True
    first = _rows(tokens, slice(0, 1))
    chunk, fixed = ([None if x is None else x.detach() for x in each] for each in (first, weights))
    rows, after = step(chunk, fixed, tuple(x.detach() for x in state))
    return not any(x.requires_grad for x in (*rows, *after))


def _split(everything: Sequence[Any], counts: tuple[int, int]) -> tuple[Sequence[Any], Sequence[Any], Rows]:
    tokens, state = counts[0], sum(counts)
    return everything[:tokens], everything[tokens:state], tuple(everything[state:])


def _chunks(tokens: Sequence[Any], size: int) -> list[slice]:
    return chunks_of(size, next(x.shape[-2] for x in tokens if x is not None))


def _rows(tokens: Sequence[Any], at: slice) -> list[Any]:
    return [None if x is None else x[..., at, :] for x in tokens]


def _plain(*everything: Any, step: Step, counts: tuple[int, int], size: int) -> tuple[Tensor, ...]:
    rows, state = step(*_split(everything, counts))
    return *rows, *state


def _forward(
    *everything: Any, step: Step, counts: tuple[int, int], size: int, keep: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    tokens, weights, state = _split(everything, counts)
    places, saved = _chunks(tokens, size), []
    outputs: list[Tensor] = []
    for at in places:
        if keep:
            saved += [x.clone() for x in state]  # rows of a whole chunk's sums would keep all of them
        rows, state = step(_rows(tokens, at), weights, state)
        outputs = outputs or [x.new_empty(*x.shape[:-2], places[-1].stop, x.shape[-1]) for x in rows]
        for out, row in zip(outputs, rows, strict=True):
            out[..., at, :] = row
    return (*outputs, *(x.clone() if any(x is y for y in everything) else x for x in state)), tuple(saved)


def _backward(
    inputs: Tensors, outputs: Tensors, saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *,
    step: Step, counts: tuple[int, int], size: int,
) -> Tensors:  # fmt: skip
    tokens, weights, first = _split(inputs, counts)
    d_tokens = [torch.zeros_like(x) if x is not None and x.is_floating_point() else None for x in tokens]
    d_weights = [torch.zeros_like(w) if w is not None and w.requires_grad else None for w in weights]
    rows = len(gradients) - len(first)
    d_state = list(gradients[rows:])
    for index, at in reversed(list(enumerate(_chunks(tokens, size)))):
        before = saved[index * len(first) : (index + 1) * len(first)]
        with torch.enable_grad():
            goals = [*_rows(d_tokens, at), *d_weights, *(torch.zeros_like(x) for x in before)]
            detached = [
                x if x is None or goal is None else x.detach().requires_grad_()
                for x, goal in zip((*_rows(tokens, at), *weights, *before), goals, strict=True)
            ]
            out, after = step(*_split(detached, counts))
        results = zip((*out, *after), (*_rows(gradients[:rows], at), *d_state), strict=True)
        pairs = [(x, grad_output) for x, grad_output in results if x.requires_grad]  # not without any key
        d_state = [goal for goal in goals[len(goals) - len(first) :] if goal is not None]
        if not pairs:
            continue
        leaves = [(x, goal) for x, goal in zip(detached, goals, strict=True) if x is not None and goal is not None]
        found = torch.autograd.grad(
            [x for x, _ in pairs], [x for x, _ in leaves], [grad for _, grad in pairs], allow_unused=True
        )
        for (_, goal), gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                goal.add_(gradient)
    return *d_tokens, *d_weights, *d_state


_RULE = Operation(_plain, cpu=Fast(_forward, _backward))


def in_chunks(advance: Method) -> Method:
    """An ``advance(q, k, v, w, state, key_mask=...)`` that walks through chunks of many new tokens."""

    @functools.wraps(advance)
    def walked(
        self: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, state: Any, *, key_mask: Tensor | None
    ) -> tuple[Tensor, Any]:  # fmt: skip
        size = _size(self, q, k, v)
        if not size:
            return advance(self, q, k, v, w, state, key_mask=key_mask)

        def step(tokens: Sequence[Any], w: Any, before: Any) -> Any:
            out, after = advance(self, *tokens[:3], w, before, key_mask=_row(tokens[3]))
            return (out,), after

        before = _before(self, k, v, w) if state is None else state
        (out,), after = scan(step, (q, k, v, _column(key_mask)), w, before, size=size)
        return out, after

    return cast("Method", walked)


def summed_in_chunks(summarise_keys: Method) -> Method:
    """A ``summarise_keys(k, v, w, key_mask=...)`` that merges the states of chunks."""

    @functools.wraps(summarise_keys)
    def walked(self: Any, k: Tensor, v: Tensor, w: Any, *, key_mask: Tensor | None = None) -> Any:
        size = _size(self, k, v)
        if not size:
            return summarise_keys(self, k, v, w, key_mask=key_mask)

        def step(tokens: Sequence[Any], w: Any, before: Any) -> Any:
            return (), self.merge_states(before, summarise_keys(self, *tokens[:2], w, key_mask=_row(tokens[2])))

        return scan(step, (k, v, _column(key_mask)), w, _before(self, k, v, w), size=size)[1]

    return cast("Method", walked)


def _column(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask[..., None]


def _row(column: Tensor | None) -> Tensor | None:
    return None if column is None else column[..., 0]


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
