"""All-gather and all-to-all with gradients, and a count of the bytes that they send.

Every gradient is made contiguous and goes back to the process that its tensor came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fast_attention.mechanism import Unsupported


@dataclass(eq=False)
class Traffic:
    """Bytes that this process sent to others."""

    bytes: int = 0


_COUNTERS: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count the bytes that this process sends to others inside the block, also in backward passes."""
    traffic = Traffic()
    _COUNTERS.append(traffic)
    try:
        yield traffic
    finally:
        _COUNTERS.remove(traffic)


def all_gather(x: Tensor, group: Any) -> Tensor:
    """A tensor of every process, equal in shape, stacked in the order of ranks: (W, ...)."""
    return _AllGather.apply(x, group)  # type: ignore[no-any-return]


def all_to_all(parts: Sequence[Tensor], incoming: Sequence[int], group: Any) -> Tensor:
    """Send the tokens ``parts[j]`` (..., n, E) to rank j, and join the ``incoming[i]`` tokens of every rank i."""
    rows = torch.cat([part.movedim(-2, 0) for part in parts])
    received: Any = _AllToAll.apply(rows, [part.shape[-2] for part in parts], list(incoming), group)
    return received.movedim(0, -2).contiguous()


def with_gradient(out: Tensor, received: Tensor) -> Tensor:
    """``out``, whose backward pass also passes ``received``: a collective that one process skips waits for ever."""
    return _WithGradient.apply(out, received)  # type: ignore[no-any-return]


def _once() -> None:
    """Raise where a gradient is to be differentiated again: what it owes to other processes would be left out."""
    if torch.is_grad_enabled():
        raise Unsupported(
            "over several processes there are no second derivatives (create_graph=True). What would work: first ones, "
            "or one process"
        )


def _count(numbers: int, x: Tensor) -> None:
    for traffic in _COUNTERS:
        traffic.bytes += numbers * x.element_size()


def _exchange(x: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
    """Send so many rows of a tensor to every process, and get so many of each."""
    out = x.new_empty(sum(incoming), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), incoming, outgoing, group=group)
    _count((sum(outgoing) - outgoing[dist.get_rank(group)]) * x.shape[1:].numel(), x)
    return out


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        world = dist.get_world_size(group)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
        dist.all_gather(parts, x.contiguous(), group=group)
        _count((world - 1) * x.numel(), x)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _once()
        each = [1] * len(grads[0])
        return _exchange(grads[0], each, each, ctx.group).sum(0), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (incoming, outgoing), group
        return _exchange(x, outgoing, incoming, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _once()
        return _exchange(grads[0], ctx.sizes[0], ctx.sizes[1], ctx.group), None, None, None


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, received: Tensor) -> Tensor:
        ctx.like = (received.shape, received.dtype, received.device)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shape, dtype, device = ctx.like
        return grads[0], torch.zeros(shape, dtype=dtype, device=device)
