"""What processes send one another, with gradients: all-gather, all-to-all and swaps of flat tensors; counts bytes.

Every gradient is made contiguous and goes back to the process that its tensor came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fast_attention.mechanism import Unsupported


@dataclass
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


class Flight:
    """An ``all_gather`` under way: ``started`` with its tensor, and ``landed`` when that of all is needed.

    What is computed between the two does not wait for it; so it is in the backward pass, between ``landed`` and
    ``started``. All processes start and land in one order.

    Args:
        group: The ``ProcessGroup``.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.parts: list[Tensor] = []
        self.work: Any = None

    def started(self, x: Tensor) -> Tensor:
        """The same tensor, on its way; hand it to ``landed``."""
        return _Start.apply(x, self)  # type: ignore[no-any-return]

    def landed(self, x: Tensor) -> Tensor:
        """The tensor of every process, stacked in the order of ranks: (W, ...)."""
        return _Land.apply(x, self)  # type: ignore[no-any-return]


def all_to_all(x: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
    """Send ``outgoing[j]`` numbers of a flat tensor to rank j, and join the ``incoming[i]`` numbers of every rank i."""
    return _AllToAll.apply(x, outgoing, incoming, group)  # type: ignore[no-any-return]


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum of every process's tensor, equal in shape."""
    return _AllReduce.apply(x, group)  # type: ignore[no-any-return]


def reduced(numbers: int, world: int) -> int:
    """How many numbers each process sends for the sum of so many, around a ring."""
    return 2 * numbers * (world - 1) // world


def swap(x: Tensor, partner: int, group: Any) -> Tensor:
    """The flat tensor of another process, equal in size, which gets this one's."""
    sizes = [x.numel() * (rank == partner) for rank in range(dist.get_world_size(group))]
    return all_to_all(x, sizes, sizes, group)


def with_gradient(out: Tensor, received: Tensor) -> Tensor:
    """``out``, whose backward pass also passes ``received``: a collective that one process skips waits for ever."""
    return _WithGradient.apply(out, received)  # type: ignore[no-any-return]


def _count(numbers: int, x: Tensor) -> None:
    for traffic in _COUNTERS:
        traffic.bytes += numbers * x.element_size()


def _once() -> None:
    """Raise where a gradient is to be differentiated again: what it owes to other processes would be left out."""
    if torch.is_grad_enabled():
        raise Unsupported(
            "over several processes there are no second derivatives (create_graph=True). What would work: first ones, "
            "or one process"
        )


def _exchange(x: Tensor, outgoing: list[int], incoming: list[int], group: Any) -> Tensor:
    out = x.new_empty(sum(incoming))
    dist.all_to_all_single(out, x.contiguous(), incoming, outgoing, group=group)
    _count(sum(outgoing) - outgoing[dist.get_rank(group)], x)
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
        (grad,) = grads
        world, size = len(grad), grad[0].numel()
        parts = _exchange(grad.reshape(-1), [size] * world, [size] * world, ctx.group)
        return parts.view(grad.shape).sum(0), None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        world = dist.get_world_size(flight.group)
        flight.parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
        flight.work = dist.all_gather(flight.parts, x.contiguous(), group=flight.group, async_op=True)
        _count((world - 1) * x.numel(), x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flight = ctx.flight
        flight.work.wait()
        return flight.parts[0].view(dist.get_world_size(flight.group), *grads[0].shape).sum(0), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.work.wait()
        return torch.stack(flight.parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _once()
        (grad,), flight = grads, ctx.flight
        flat = grad.contiguous().view(-1)
        flight.parts = [torch.empty_like(flat)]
        flight.work = dist.all_to_all_single(flight.parts[0], flat, group=flight.group, async_op=True)
        _count((len(grad) - 1) * grad[0].numel(), flat)
        return grad.new_zeros(grad.shape[1:]), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        _count(reduced(x.numel(), dist.get_world_size(group)), x)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _once()
        return all_reduce(grads[0], ctx.group), None


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
