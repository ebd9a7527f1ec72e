"""Training in one process or several under ``torchrun``: shards batches, averages gradients, shares decisions."""

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
    """The processes that train one model; with one process no method communicates.

    Args:
        rank: The number of this process.
        size: The number of processes.
        device: The device of this process.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        # Decisions are exchanged on the CPU, so that they do not wait for the accelerator.
        self._cpu_group: Any = distributed.new_group(backend="gloo") if size > 1 else None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def shard(self, batch: Batch) -> Batch:
        """This process's sequences of a batch, on its device."""
        (tokens, targets, mask), rows = batch, slice(self.rank, None, self.size)
        return Batch(tokens[rows], targets[rows], None if mask is None else mask[rows]).to(self.device)

    def highest(self, *numbers: float) -> list[float]:
        """The maximum of each number over all processes."""
        if self.size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        distributed.all_reduce(values, distributed.ReduceOp.MAX, group=self._cpu_group)
        return values.tolist()

    def total(self, numbers: Tensor) -> list[float]:
        """The sums of numbers over all processes."""
        if self.size == 1:
            return numbers.tolist()
        values = numbers.cpu()
        distributed.all_reduce(values, group=self._cpu_group)
        return values.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of ranks."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value, group=self._cpu_group)
        return values

    def wrap(self, model: Model, fsdp: bool) -> nn.Module:
        """Wrap the model so that its backward pass averages gradients over the processes (DDP or FSDP2)."""
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

    def gradient_sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """A context for each batch of a step: gradients are exchanged with the last one only."""
        if isinstance(wrapped, DistributedDataParallel) and not last:
            return wrapped.no_sync()
        return contextlib.nullcontext()


def usable(name: str) -> torch.device:
    """The device called ``name``, after a test that it computes.

    Raises:
        ValueError: There is none that computes.
    """
    try:
        torch_device = torch.device(name)
        torch.zeros(1, device=torch_device).item()
    except Exception as error:  # every backend has its own kinds
        raise ValueError(f"device={name!r}: that device is not available here") from error
    return torch_device


@contextlib.contextmanager
def join(device: str) -> Iterator[Group]:
    """Join the group of processes that ``torchrun`` started, or make one of this process alone.

    Raises:
        ValueError: There is no such device.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch_device = usable(device)
    if size > 1 and torch_device.type == "cuda" and torch_device.index is None:
        torch_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(torch_device)
    if size == 1:
        yield Group(0, 1, torch_device)
        return
    distributed.init_process_group("nccl" if torch_device.type == "cuda" else "gloo")
    try:
        yield Group(rank, size, torch_device)
    finally:
        distributed.destroy_process_group()
