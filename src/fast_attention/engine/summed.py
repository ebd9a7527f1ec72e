"""Loops over chunks, forward and backward, for attention whose queries read sums over the keys that they may see.

Causal queries read prefix sums: one row of sums is carried from chunk to chunk, in float64. Noncausal ones all read the
same totals. A family writes what one chunk does; the loops order the chunks and carry the sums and their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.chunks import RunningSum, chunks
from fast_attention.engine.operation import Fast, always
from fast_attention.engine.scan import accumulate_


@runtime_checkable
class Pass(Protocol):
    """Work on one chunk. Sums are (..., 1, W) over all keys, or, causal, (..., chunk, W) over those up to each."""

    def terms(self, at: slice) -> tuple[Tensor, ...]:
        """Terms that the keys of a chunk add to the sums, side by side."""
        ...

    def read(self, at: slice, sums: Tensor) -> None:
        """Writes the outputs of a chunk of queries."""
        ...

    def terms_again(self, at: slice) -> tuple[Tensor, ...]:
        """The first of ``terms``, as many as queries need for their gradients; keys are mapped again."""
        ...

    def read_vjp(self, at: slice, sums: Tensor) -> tuple[Tensor, ...]:
        """Writes the gradients of a chunk of queries; returns those of the sums that they read, side by side."""
        ...

    def terms_vjp(self, at: slice, d_sums: Tensor) -> None:
        """Writes the gradients of the keys that ``terms_again`` mapped; d_sums are added up over their queries."""
        ...


def forward(one: Pass, queries: Tensor, keys: Tensor, *, is_causal: bool) -> Tensor:
    """Runs ``terms`` and ``read`` over all chunks; returns the sums over all keys, or those before every chunk."""
    total, before = RunningSum(), []
    if is_causal:
        for at in chunks(keys):
            sums = torch.cat(one.terms(at), -1)
            before.append(total.carry_(sums))
            one.read(at, sums)
        return torch.cat(before, -2)
    for at in chunks(keys):
        total.add(*one.terms(at))
    sums = total.row(keys)
    for at in chunks(queries):
        one.read(at, sums)
    return sums


def backward(one: Pass, queries: Tensor, keys: Tensor, saved: Tensor, *, is_causal: bool) -> None:
    """Runs ``read_vjp`` and ``terms_vjp`` over all chunks, ``saved`` being what ``forward`` returned."""
    total = RunningSum()
    if is_causal:
        for i, at in reversed(list(enumerate(chunks(keys)))):
            sums = torch.cat(one.terms_again(at), -1)
            sums[..., :1, :] += saved[..., i : i + 1, : sums.shape[-1]]
            d_sums = torch.cat(one.read_vjp(at, accumulate_(sums)), -1)
            total.carry_(d_sums, backwards=True)
            one.terms_vjp(at, d_sums)
        return
    for at in chunks(queries):
        total.add(*one.read_vjp(at, saved))
    d_sums = total.row(keys)
    for at in chunks(keys):
        one.terms_again(at)
        one.terms_vjp(at, d_sums)


def visible(x: Tensor, key_mask: Tensor | None, at: slice) -> Tensor:
    """The rows of a chunk, zeros where masked."""
    return masks.drop(x[..., at, :], None if key_mask is None else key_mask[..., at])


def rows(x: Tensor, at: slice) -> Tensor:
    """The rows of a chunk, or the one row that serves all tokens."""
    return x if x.shape[-2] == 1 else x[..., at, :]


def empty(x: Tensor) -> Tensor:
    """Contiguous memory for a gradient or an output like ``x``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fast(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    values: int,
    even: int,
    serves: Callable[..., str] = always,
) -> Fast:
    """Passes chunk by chunk, which have ``settings``; ``values``: which of the tensors are the values."""

    def path(*tensors: Tensor, settings: Any) -> str:
        return f"{'prefix sums' if settings.is_causal else 'sums over all keys'}, chunk by chunk"

    def why(*tensors: Tensor, settings: Any) -> str:
        return "causal" if settings.is_causal else "every query sees the same keys"

    def sizes(*tensors: Tensor, settings: Any) -> dict[str, int]:
        return {"chunk": chunks(tensors[values])[0].stop}

    return Fast(forward, backward, even=even, path=path, why=why, sizes=sizes, serves=serves)
