"""A sequence in chunks that hand on a state: the loops, the memory and the gradients of whatever sums its keys up.

A family writes one function of a chunk, ``step``; decoding, prefill and training are that function. Beside inputs and
outputs nothing is saved but the state before every chunk, and the backward pass runs each chunk again with autograd, so
that features are never held for the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine.operation import Fast, Operation, Tensors

State = tuple[Tensor, ...]
# (tokens of a chunk, weights, state before it) -> (rows of the output, or none; state after it)
Step = Callable[[Sequence[Any], Sequence[Any], State], tuple[tuple[Tensor, ...], State]]


def scan(
    step: Step, tokens: Sequence[Tensor | None], weights: Sequence[Any], state: State, *, size: int
) -> tuple[tuple[Tensor, ...], State]:
    """``step`` over chunks of ``size`` tokens, first to last: all rows, and the state after the last chunk.

    Args:
        step: What one chunk does. Where it holds parameters of its own, which autograd would not find through chunks,
            the whole sequence is one.
        tokens: Tensors (..., L, E) that are split along L; None and booleans have no gradient.
        weights: Tensors, or None, that every chunk uses.
        state: The state before the first chunk.
        size: Tokens of a chunk.
    """
    run = _RULE if _closed(step, tokens, weights, state) else _plain
    results = run(*tokens, *weights, *state, step=step, counts=(len(tokens), len(weights)), size=size)
    rows = len(results) - len(state)
    return results[:rows], results[rows:]


def _closed(step: Step, tokens: Sequence[Any], weights: Sequence[Any], state: State) -> bool:
    """Whether a step of one token has no gradient but those of its arguments."""
    if not torch.is_grad_enabled():
        return True
    first = _rows(tokens, slice(0, 1))
    chunk, fixed = ([None if x is None else x.detach() for x in each] for each in (first, weights))
    rows, after = step(chunk, fixed, tuple(x.detach() for x in state))
    return not any(x.requires_grad for x in (*rows, *after))


def _split(everything: Sequence[Any], counts: tuple[int, int]) -> tuple[Sequence[Any], Sequence[Any], State]:
    tokens, state = counts[0], sum(counts)
    return everything[:tokens], everything[tokens:state], tuple(everything[state:])


def _chunks(tokens: Sequence[Any], size: int) -> list[slice]:
    length = next(x.shape[-2] for x in tokens if x is not None)
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]


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
