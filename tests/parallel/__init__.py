"""One sequence over several processes, started once for each file, and what every process compares with one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

SHARED = ["torch", "torch.distributed", "pytest", "fast_attention", "fast_attention.parallel", "tests.cases"]
HEADS = 4
LENGTHS = {2: [6, 5], 4: [3, 1, 5, 2]}


def spread(process: Callable[..., None], args: tuple[Any, ...], processes: int) -> None:
    """Run ``process(rank, *args)`` so many times side by side.

    All fork from one that has imported torch and the library: importing them took more time than most of these tests.
    """
    multiprocessing.set_forkserver_preload(SHARED)
    torch.multiprocessing.start_processes(process, args, processes, start_method="forkserver")


def join(rank: int, world: int, folder: str) -> None:
    """Become one of the processes that meet in a folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)


def wrong(found: str) -> bool:
    """Whether a process found something: then all go no further, and a seeded fault costs what comes before it."""
    told = torch.tensor(float(bool(found)))
    dist.all_reduce(told)
    return bool(told)


def leave(results: Any, folder: str) -> None:
    """Save what was found and end this process when all are done.

    An ordinary exit was seen to abort, rarely, while threads of gloo end.
    """
    torch.save(results, f"{folder}/{dist.get_rank()}")
    dist.barrier()
    os._exit(0)


def cut(x: Tensor, lengths: Sequence[int], axis: int = -2) -> Tensor:
    """The part of a whole tensor that this process holds."""
    return x.split(list(lengths), axis)[dist.get_rank()]


def gradients(out: Tensor, inputs: Sequence[Tensor], direction: Tensor) -> list[Tensor]:
    """Gradients of the outputs along a direction, zeros where there are none."""
    grads = torch.autograd.grad(out, list(inputs), direction, materialize_grads=True, allow_unused=True)
    return [grad.contiguous() for grad in grads]  # numbers are reduced in the order of memory


def differences(
    here: tuple[Tensor, list[Tensor], list[Tensor]], whole: tuple[Tensor, list[Tensor], list[Tensor]],
    lengths: list[Sequence[int]],
) -> str:  # fmt: skip
    """What differs between this process and the whole: outputs, gradients of inputs, gradients of weights.

    ``lengths`` are those of the outputs and of each input. Gradients of weights are summed over processes.
    """
    out, inputs, weights = here
    wanted, all_inputs, all_weights = whole
    for grad in weights:
        dist.all_reduce(grad)
    pairs = list(zip(inputs, all_inputs, lengths[1:], strict=True))
    slopes = [(a - cut(b, sizes), b) for a, b, sizes in pairs]
    slopes += [(a - b, b) for a, b in zip(weights, all_weights, strict=True)]
    error = largest(out - cut(wanted, lengths[0]))
    slope = max(largest(difference) / max(1.0, largest(b)) for difference, b in slopes)
    return "" if error <= 1e-12 and slope <= 1e-11 else f"outputs {error}, gradients {slope}"


def largest(x: Tensor) -> float:
    """The largest absolute number; 0 of none."""
    return x.detach().abs().max().item() if x.numel() else 0.0


def message(call: Callable[[], Any]) -> str:
    """The error of a call in words; empty where there is none."""
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
