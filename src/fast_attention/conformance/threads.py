"""The law of threads: concurrent calls give what they give one after another.

Races over memory of a module or of the library rarely show by chance, so the threads go in step: each waits for the
others before every layer of a model, or before every function of torch, where all hold unfinished work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fast_attention.conformance.finding import Breaches, all_moved, law
from fast_attention.conformance.under_test import AttentionUnderTest, with_gradients

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

    layers = () if model is None else model.modules()
    handles = [layer.register_forward_pre_hook(lambda *_: _wait(barrier)) for layer in layers]
    try:
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(run, jobs))
    finally:
        for handle in handles:
            handle.remove()


def difference_in_step(jobs: Sequence[Callable[[], tuple[Tensor, ...]]], model: nn.Module | None = None) -> float:
    """The largest change of the jobs' tensors when they run concurrently."""
    expected = [job() for job in jobs]
    return max(map(all_moved, run_in_step(jobs, model), expected), default=0.0)


def _lengths(subject: AttentionUnderTest, module: Any, device: str) -> list[int]:
    """The length of every thread's call, the last another one where the attention takes it."""
    length = subject.length // 2
    with suppress(Exception):  # a length it does not take is another law's business
        subject.call(module, subject.draw(length, device=device), subject.modes[0], None)
        return [subject.length] * 3 + [length]
    return [subject.length] * 3


@law("threads")
def threads(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """Calls, gradients and decoding in several threads give what they give one after another.

    Three calls are of one length, for memory that they could share; one is of another, for what is kept by length. Up
    to rounding: the number of torch's own threads in a call, on which last bits depend, is not the call's choice.
    """
    module: Any = subject.built(device=device)
    lengths = _lengths(subject, module, device)

    def call(seed: int, is_causal: bool) -> tuple[Tensor, ...]:
        inputs = subject.draw(lengths[seed], seed=seed, device=device)
        return with_gradients(lambda *x: subject.call(module, x, is_causal, None), inputs, module)

    def decode(seed: int, module: Any = module) -> tuple[Tensor, ...]:
        inputs, outs, state = subject.draw(9, seed=seed, device=device), [], None
        for start, stop in ((0, 5), (5, 6), (6, 9)):
            out, state = module.decode(*(x[..., start:stop, :] for x in inputs), state)
            outs.append(out.detach())
        return tuple(outs)

    kinds: dict[str, Callable[[int], tuple[Tensor, ...]]] = {
        f"is_causal={causal}": lambda seed, causal=causal: call(seed, causal) for causal in subject.modes
    }
    mechanism = subject.mechanism
    if mechanism is not None and mechanism.traits.memory is not None:
        kinds["decode"] = decode
    for name, kind in kinds.items():
        yield difference_in_step([lambda seed=seed, kind=kind: kind(seed) for seed in range(len(lengths))]), name
