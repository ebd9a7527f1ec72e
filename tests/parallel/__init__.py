"""One sequence over several processes, started once for each file."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

SHARED = ["torch", "torch.distributed", "pytest", "fast_attention", "fast_attention.parallel", "tests.cases"]


def spread(process: Callable[..., None], args: tuple[Any, ...], processes: int) -> None:
    """Run ``process(rank, *args)`` so many times side by side.

    All fork from one that has imported torch and the library: importing them took more time than most of these tests.
    """
    multiprocessing.set_forkserver_preload(SHARED)
    torch.multiprocessing.start_processes(process, args, processes, start_method="forkserver")


def wrong(found: str) -> bool:
    """Whether a process found something: then all go no further, and a seeded fault costs what comes before it."""
    told = torch.tensor(float(bool(found)))
    dist.all_reduce(told)
    return bool(told)


def leave() -> None:
    """End this process when all are done: an ordinary exit was seen to abort, rarely, while threads of gloo end."""
    dist.barrier()
    os._exit(0)
