"""The law of threads: concurrent calls give what they give one after another.

Races over memory of a module or of the library rarely show by chance, so the threads go in step: each waits for the
others before every layer of a model, or before every function of torch, where all hold unfinished work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fast_attention.conformance.finding import Breaches, all_moved
from fast_attention.conformance.under_test import Case, law_of_calls, with_gradients

PATIENCE = 10.0  # seconds after which the threads no longer wait for one another


def _wait(barrier: threading.Barrier) -> None:
    """Wait for the other threads, until one of them is done or failed."""
    with suppress(threading.BrokenBarrierError):  # from then on no thread waits
        barrier.wait(PATIENCE)


class _WaitBeforeFunctions(TorchFunctionMode):
    """Waits for the other threads before every function of torch."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _wait(self.barrier)
        return func(*args, **(kwargs or {}))


def run_in_step(jobs: Sequence[Callable[[], Any]], model: nn.Module | None = None) -> list[Any]:
    """The results of jobs in threads of their own, in step before every layer of ``model`` or function of torch."""
    barrier, grad = threading.Barrier(len(jobs)), torch.is_grad_enabled()

    def run(job: Callable[[], Any]) -> Any:
        try:
            with torch.set_grad_enabled(grad), nullcontext() if model is not None else _WaitBeforeFunctions(barrier):
                return job()
        finally:
            barrier.abort()

    with ExitStack() as hooks, ThreadPoolExecutor(len(jobs)) as pool:
        for layer in () if model is None else model.modules():
            hooks.enter_context(layer.register_forward_pre_hook(lambda *_: _wait(barrier)))
        return list(pool.map(run, jobs))


def difference_in_step(jobs: Sequence[Callable[[], tuple[Tensor, ...]]], model: nn.Module | None = None) -> float:
    """The largest change of the jobs' tensors when they run concurrently."""
    expected = [job() for job in jobs]
    return max(map(all_moved, run_in_step(jobs, model), expected), default=0.0)


@law_of_calls("threads")
def threads(case: Case) -> Breaches:
    """Calls, gradients and decoding in several threads give what they give one after another.

    Three calls are of one length, for memory that they could share; one is of another, for what is kept by length. Up
    to rounding: the number of torch's own threads in a call, on which last bits depend, is not the call's choice.
    """
    lengths = [case.length] * 3
    with suppress(Exception):  # a length it does not take is another law's business
        case.call(*case.draw(case.length // 2))
        lengths.append(case.length // 2)

    def call(seed: int) -> tuple[Tensor, ...]:
        return with_gradients(case.call, case.draw(lengths[seed], seed=seed), case.module)

    def decode(seed: int) -> tuple[Tensor, ...]:
        inputs, outs, state = case.draw(9, seed=seed), [], None
        for start, stop in ((0, 5), (5, 6), (6, 9)):
            out, state = case.module.decode(*(x[..., start:stop, :] for x in inputs), state)
            outs.append(out.detach())
        return tuple(outs)

    streams = case.is_causal and case.promises is not None and case.promises.memory is not None
    for kind in (call, decode) if streams else (call,):
        yield difference_in_step([partial(kind, seed) for seed in range(len(lengths))]), kind.__name__
