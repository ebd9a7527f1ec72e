"""The law of threads: calls at the same time give what they give one after another.

Chance would rarely show that calls meet in memory of a module or of the library, so the threads go in step: each waits
for the others before every layer of a model, or before every function of torch, where all hold half-finished work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fast_attention.conformance.finding import Finding, judged, law, moved, rounding
from fast_attention.conformance.under_test import AttentionUnderTest

PATIENCE = 10.0  # seconds after which the threads no longer wait for one another


class Meeting:
    """Where threads wait for one another, until one of them is done or failed."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)

    def wait(self, *_: Any) -> None:
        """Until all are here."""
        with suppress(threading.BrokenBarrierError):  # from then on each goes its own way
            self._barrier.wait(PATIENCE)

    def leave(self) -> None:
        """Nobody waits any more."""
        self._barrier.abort()


class _Everywhere(TorchFunctionMode):
    """Waits before every function of torch that this thread calls."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.meeting = meeting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meeting.wait()
        return func(*args, **(kwargs or {}))


@contextmanager
def _before_layers(model: nn.Module, meeting: Meeting) -> Iterator[None]:
    handles = [part.register_forward_pre_hook(meeting.wait) for part in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def together(jobs: Sequence[Callable[[], Any]], model: nn.Module | None = None) -> list[Any]:
    """What the jobs give, each in a thread of its own, in step before every layer of ``model`` or every function."""
    meeting, grad = Meeting(len(jobs)), torch.is_grad_enabled()

    def run(job: Callable[[], Any]) -> Any:
        try:
            with torch.set_grad_enabled(grad):
                if model is not None:
                    return job()
                with _Everywhere(meeting):
                    return job()
        finally:
            meeting.leave()

    with ThreadPoolExecutor(len(jobs)) as pool:
        if model is None:
            return list(pool.map(run, jobs))
        with _before_layers(model, meeting):
            return list(pool.map(run, jobs))


def differ(jobs: Sequence[Callable[[], tuple[Tensor, ...]]], model: nn.Module | None = None) -> float:
    """How far the jobs' tensors move when they run at the same time."""
    alone = [job() for job in jobs]
    beside = together(jobs, model)
    return max(
        (moved(a, b) for ones, others in zip(beside, alone, strict=True) for a, b in zip(ones, others, strict=True)),
        default=0.0,
    )


@law("threads")
def threads(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Calls, gradients and stretches of decoding in three threads give what they give one after another.

    Up to rounding: how many threads of torch's own a call gets, and with them its last bits, is not the call's to say.
    """
    made: Any = subject.built(device=device)
    weights = list(made.parameters()) if isinstance(made, nn.Module) else []
    worst, at = 0.0, ""

    def call(seed: int, is_causal: bool) -> tuple[Tensor, ...]:
        inputs = tuple(x.requires_grad_() for x in subject.draw(subject.length, seed=seed, device=device))
        with torch.enable_grad():
            out = subject.call(made, inputs, is_causal, None)
            probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
            slopes = torch.autograd.grad(
                (out * probe).sum(), [*inputs, *weights], allow_unused=True, materialize_grads=True
            )
        return out.detach(), *slopes

    def decode(seed: int, made: Any = made) -> tuple[Tensor, ...]:
        inputs, outs, state = subject.draw(9, seed=seed, device=device), [], None
        for start, stop in ((0, 5), (5, 6), (6, 9)):
            out, state = made.decode(*(x[..., start:stop, :] for x in inputs), state)
            outs.append(out.detach())
        return tuple(outs)

    kinds: dict[str, Callable[[int], tuple[Tensor, ...]]] = {
        f"is_causal={causal}": lambda seed, causal=causal: call(seed, causal) for causal in subject.modes
    }
    mechanism = subject.mechanism
    if mechanism is not None and mechanism.traits.memory is not None:
        kinds["decode"] = decode
    for name, kind in kinds.items():
        size = differ([lambda seed=seed, kind=kind: kind(seed) for seed in range(3)])
        if not size <= worst:
            worst, at = size, name
    return judged(worst, rounding(subject.dtype), at)
