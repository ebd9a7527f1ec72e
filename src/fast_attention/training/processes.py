"""One process or many: under ``torchrun`` batches are dealt out, gradients are summed, decisions are shared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fast_attention.nn.models import Model
from fast_attention.tasks.task import Batch


class Group:
    """The processes that train one model; alone, every method is what it would be without others.

    Args:
        rank: The number of this process.
        size: How many there are.
        device: Where this one computes.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        # Decisions travel on the CPU, so that asking does not wait for the accelerator.
        self._desk: Any = distributed.new_group(backend="gloo") if size > 1 else None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def mine(self, batch: Batch) -> Batch:
        """This process's sequences of a batch, on its device."""
        (tokens, targets, mask), own = batch, slice(self.rank, None, self.size)
        return Batch(tokens[own], targets[own], None if mask is None else mask[own]).to(self.device)

    def highest(self, *numbers: float) -> list[float]:
        """The greatest of each number over all processes."""
        if self.size == 1:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64)
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._desk)
        return found.tolist()

    def total(self, numbers: Tensor) -> list[float]:
        """The sums of numbers over all processes."""
        if self.size == 1:
            return numbers.tolist()
        found = numbers.cpu()
        distributed.all_reduce(found, group=self._desk)
        return found.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of their numbers."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(found, value, group=self._desk)
        return found

    def wrap(self, model: Model, fsdp: bool) -> nn.Module:
        """The model whose backward pass averages gradients over the processes."""
        if self.size == 1:
            return model
        if not fsdp:
            return DistributedDataParallel(model)
        from torch.distributed.fsdp import fully_shard

        if not model.config.reversible:
            for block in model.blocks:
                fully_shard(block)
        fully_shard(model)
        return model

    def adding_up(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around the batches of one step: gradients travel with the last one only."""
        if isinstance(wrapped, DistributedDataParallel) and not last:
            return wrapped.no_sync()
        return contextlib.nullcontext()


def usable(name: str) -> torch.device:
    """The device called ``name``, tried with one number.

    Raises:
        ValueError: There is none that computes.
    """
    try:
        where = torch.device(name)
        torch.zeros(1, device=where).item()
    except Exception as error:  # every backend has its own kinds
        raise ValueError(f"device={name!r}: that device is not available here") from error
    return where


@contextlib.contextmanager
def join(device: str) -> Iterator[Group]:
    """The group that ``torchrun`` has started this process in, or this process alone.

    Raises:
        ValueError: There is no such device.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    where = usable(device)
    if size > 1 and where.type == "cuda" and where.index is None:
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    if size == 1:
        yield Group(0, 1, where)
        return
    distributed.init_process_group("nccl" if where.type == "cuda" else "gloo")
    try:
        yield Group(rank, size, where)
    finally:
        distributed.destroy_process_group()
