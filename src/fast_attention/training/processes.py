"""Training in one process or several under ``torchrun``: shards batches, averages gradients, shares decisions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fast_attention.nn.models import Model
from fast_attention.parallel import parallelize
from fast_attention.tasks.task import IGNORED, Batch


class Group:
    """The processes that train one model; with one process no method communicates.

    Neighbours in rank hold one sequence, ``sequence`` of them; the batch is shared by such groups.

    Args:
        rank: The number of this process.
        size: The number of processes.
        device: The device of this process.
        sequence: The number of processes that hold one sequence, a divisor of ``size``.
    """

    def __init__(self, rank: int, size: int, device: torch.device, sequence: int = 1) -> None:
        self.rank, self.size, self.device, self.sequence = rank, size, device, sequence
        self.mesh = None
        if size > 1:
            shape = (size // sequence, sequence)
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
        # Decisions are exchanged on the CPU, so that they do not wait for the accelerator.
        self._cpu_group: Any = distributed.new_group(backend="gloo") if size > 1 else None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    @property
    def data(self) -> int:
        """The number of groups that share a batch."""
        return self.size // self.sequence

    def tokens(self, length: int) -> slice:
        """The positions that this process holds of a sequence: as many as the others, or one more."""
        at, (each, rest) = self.rank % self.sequence, divmod(length, self.sequence)
        start = at * each + min(at, rest)
        return slice(start, start + each + (at < rest))

    def shard(self, batch: Batch) -> Batch:
        """This process's sequences of a batch, its tokens of them, on its device.

        A class of a whole sequence is a target of one process only.
        """
        (tokens, targets, mask), rows = batch, slice(self.rank // self.sequence, None, self.data)
        at = self.tokens(tokens.shape[1])
        targets = targets[rows]
        if targets.ndim > 1:
            targets = targets[:, at]
        elif self.rank % self.sequence:
            targets = torch.full_like(targets, IGNORED)
        return Batch(tokens[rows, at], targets, None if mask is None else mask[rows, at]).to(self.device)

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
        values = numbers.cpu().double()
        distributed.all_reduce(values, group=self._cpu_group)
        return values.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of ranks."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value, group=self._cpu_group)
        return values

    def wrap(self, model: Model, fsdp: bool) -> nn.Module:
        """Wrap the model so that its backward pass averages gradients over the processes (DDP or FSDP2).

        Raises:
            Unsupported: Its mechanisms cannot be spread over the processes that hold a sequence.
        """
        if self.size == 1:
            return model
        assert self.mesh is not None
        if self.sequence > 1:
            parallelize(model, self.mesh["sequence"])
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


class LostProcess(RuntimeError):
    """Another process of the run is gone, so that this one cannot go on."""


_SIGNS = ("gloo", "nccl", "connection", "peer", "broken pipe", "timed out")  # of errors of a collective


def lost(error: BaseException) -> bool:
    """Whether an error is that of a collective whose partner is gone."""
    words = str(error).lower()
    known = isinstance(error, distributed.DistError) or any(sign in words for sign in _SIGNS)
    return isinstance(error, RuntimeError) and known


LOST = "lost"  # the file that the first process leaves that notices another's end


def lost_process(out: Path, step: int) -> LostProcess:
    """The error for a process that is gone: in words for the first that notices, for all share the run's folder."""
    try:
        (out / LOST).touch(exist_ok=False)
    except OSError:
        return LostProcess("")
    return LostProcess(
        f"another process of this run is gone, at step {step} (torchrun says below which, and why): all have ended. "
        "The last checkpoint is whole; the same command with --resume goes on from it, with any number of processes"
    )


@contextlib.contextmanager
def join(device: str, sequence: int = 1) -> Iterator[Group]:
    """Join the group of processes that ``torchrun`` started, or make one of this process alone.

    Args:
        device: Where to compute.
        sequence: The number of processes that hold one sequence.

    Raises:
        ValueError: There is no such device, or ``sequence`` does not divide the number of processes.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size % sequence:
        raise ValueError(
            f"sequence_parallel={sequence} and there are {size} processes: start a multiple of {sequence}, "
            f"torchrun --nproc-per-node {sequence} -m fast_attention train ..., or give a divisor of {size}"
        )
    torch_device = usable(device)
    if size > 1 and torch_device.type == "cuda" and torch_device.index is None:
        torch_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(torch_device)
    if size == 1:
        yield Group(0, 1, torch_device)
        return
    distributed.init_process_group("nccl" if torch_device.type == "cuda" else "gloo")
    try:
        yield Group(rank, size, torch_device, sequence)
    except LostProcess:
        raise  # what is left of the group would wait for the one that is gone
    except BaseException:
        distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()
