"""Laws of robustness: any length, scale and layout, low precision, gradients, threads, inputs left alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fast_attention.conformance.finding import Breaches, all_moved, claims, law, moved, rounding
from fast_attention.conformance.independence import padding_masks
from fast_attention.conformance.under_test import AttentionUnderTest, Case, law_of_calls, weights_of, with_gradients

LENGTHS = (1, 2, 3, 7, 16, 31, 63, 64, 65, 97)
SMALLEST = 2.0**-149  # the smallest number of float32
PATIENCE = 10.0  # seconds after which threads no longer wait for one another


@law_of_calls("any length", 0.0)
def lengths(case: Case) -> Breaches:
    """Any length works: 1, primes, not a multiple of any block."""
    refused = []
    for length in LENGTHS:
        try:
            out = case.call(*case.draw(length))
        except Exception as error:
            refused.append(f"{length} ({type(error).__name__})")
            continue
        if out.shape[-2] != length or not bool(out.isfinite().all()):
            refused.append(f"{length} (wrong length or not finite)")
    yield float(len(refused)), f"size counts lengths that fail; fails at {', '.join(refused[:4])}"


@law_of_calls("finite at large inputs", 0.0)
def finite(case: Case) -> Breaches:
    """Finite in, finite out, at inputs 100 times as large (logits of 10^4), gradients included; and 10^18 times.

    Nor is any row zero in float32 that is not in float64.
    """
    for factor in (1e2, 1e-4, 0.0):
        inputs = [(factor * x).requires_grad_() for x in case.inputs]
        out = case.call(*inputs)
        out.sum().backward()
        for tensor in (out, *(x.grad for x in inputs if x.grad is not None)):
            yield float((~tensor.isfinite()).sum()), f"inputs times {factor:g}"
    yield from _lost(case)


def _lost(case: Case) -> Breaches:
    """Count rows that are zero in float32 and not in float64, or not finite where float64's would fit into float32.

    Numbers of no more than float32's smallest one, to which or to zero they may be rounded, are none.

    Queries and keys are large and values are not; with 1e18 all are, and sums of their products do not fit.
    """
    subject, drawn = case.subject, [x.float() for x in case.inputs]
    single, double = (subject.built(dtype=dtype, device=case.device) for dtype in (torch.float32, torch.float64))
    for factor in (30.0, 1e2, 1e4, 1e18):
        inputs = [factor * x if factor > 1e4 or len(drawn) == 1 or i < 2 else x for i, x in enumerate(drawn)]
        low = [x.clone().requires_grad_() for x in inputs]
        out = subject.call(single, tuple(low), case.is_causal, None)
        exact = subject.call(double, tuple(x.double() for x in inputs), case.is_causal, None).detach()
        fits = exact.abs() < torch.finfo(torch.float32).max / 100
        wrong = int(((exact.abs() > SMALLEST).any(-1) & (out == 0).all(-1)).sum())
        wrong += int((~out.isfinite() & fits).sum())
        if factor <= 1e2:  # beyond, the gradients of torch's own kernel are NaN for logits from 10^8 on
            out.float().sum().backward()
            wrong += sum(int((~x.grad.isfinite()).sum()) for x in low if x.grad is not None)
        yield float(wrong), f"rows lost in float32 at {factor:g}"


@law_of_calls("gradients", 1e-6, dtype=torch.float64)
def gradients(case: Case) -> Breaches:
    """Gradients of inputs and weights agree with finite differences, in float64, in a random direction of all.

    What computes in float32 whatever it is given is compared in larger steps, and may be 10^4 times as far off.
    """
    inputs = [x.double().requires_grad_() for x in case.draw(case.length, batch=1)]
    leaves = [*inputs, *weights_of(case.module)]
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in leaves]
    out = case.call(*inputs)
    grad_out = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)
    grads = torch.autograd.grad((out * grad_out).sum(), leaves, allow_unused=True, materialize_grads=True)
    derivative = sum(float((g * direction).sum()) for g, direction in zip(grads, directions, strict=True))
    scale = abs(derivative) + 1

    @torch.no_grad()
    def measured(step: float) -> float:
        """The central difference."""
        values = []
        for move in (step, -2 * step):
            for x, direction in zip(leaves, directions, strict=True):
                x.add_(move * direction)
            values.append(float((grad_out * case.call(*inputs)).sum()))
        for x, direction in zip(leaves, directions, strict=True):
            x.add_(step * direction)
        return (values[0] - values[1]) / (2 * step)

    detail, slope = "directional derivative against a central difference", measured(1e-5)
    error = abs(slope - derivative)
    if error > 1e-6 * scale and abs(measured(1e-9) - slope) > 1e-2 * scale:
        error, detail = 1e-4 * abs(measured(1e-2) - derivative), f"{detail}, as rounded to float32 inside: 1e-4 times"
    elif error > 1e-6 * scale:  # a step may cross the bends of a ReLU: a smaller one crosses fewer
        error = min(error, abs(measured(1e-7) - derivative))
    yield error / scale, detail


@law("low precision", 1.0)
def precision(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """In bfloat16 and float16 the error is little more than rounding the output, and the dtype is kept."""
    for dtype in (torch.bfloat16, torch.float16):
        module = subject.built(dtype=dtype, device=device)
        exact = copy.deepcopy(module).double() if isinstance(module, nn.Module) else module
        inputs = tuple(x.to(dtype) for x in subject.draw(subject.length, device=device))
        for is_causal in subject.modes:
            low = subject.call(module, inputs, is_causal, None)
            high = subject.call(exact, tuple(x.double() for x in inputs), is_causal, None)
            size = _relative_rms(low, high) / torch.finfo(dtype).eps if low.dtype == dtype else float("inf")
            yield size, f"in units of {dtype}'s eps, {is_causal=}"


def _relative_rms(low: Tensor, high: Tensor) -> float:
    """The rms of a difference over that of the more exact output."""
    return float(((low.to(high.dtype) - high).square().mean().sqrt() / high.square().mean().sqrt()).detach())


@law_of_calls("autocast", 2e-2, dtype=torch.float32)
def autocast(case: Case) -> Breaches:
    """Under autocast to bfloat16 and float16 the outputs stay within 2 % of float32's."""
    plain = case.call(*case.inputs)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(torch.device(case.device).type, dtype):
            low = case.call(*case.inputs)
        yield _relative_rms(low, plain), "relative rms"


@law_of_calls("backward inside autocast", rounding(torch.float32), dtype=torch.float32)
def backward_autocast(case: Case) -> Breaches:
    """A backward pass computes as its forward pass did: inside autocast and outside it gives the same gradients.

    After a forward pass outside of autocast the backward pass inside only has to succeed: torch then runs the products
    that autograd recorded in low precision.
    """
    kind, length = torch.device(case.device).type, case.length if case.promises is None else 97
    inputs = [x.float().requires_grad_() for x in case.draw(length, batch=1)]
    leaves, results = (*inputs, *weights_of(case.module)), []
    for forward, backward in ((False, True), (True, True), (True, False)):
        with torch.autocast(kind, torch.bfloat16, enabled=forward):
            out = case.call(*inputs).float().square().sum()
        with torch.autocast(kind, torch.bfloat16, enabled=backward):
            results.append(torch.autograd.grad(out, leaves, allow_unused=True, materialize_grads=True))
    yield all_moved(*results[1:]), ""


@law("determinism", 0.0)
def repeats(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """Two calls agree to the bit, and so do two instances with the same seed, whatever they were called with before.

    Nor does a later call write into what an earlier one returned.
    """
    module, second = subject.built(device=device), subject.built(device=device)
    inputs, others = (subject.draw(subject.length, seed=seed, device=device) for seed in (0, 1))
    mask = padding_masks(subject.length, inputs[0].device) if subject.padding else None
    outs = [subject.call(module, inputs, is_causal, None) for is_causal in subject.modes]
    first = [out.detach().clone() for out in outs]
    for i, is_causal in reversed([*enumerate(subject.modes)]):
        subject.call(second, others, is_causal, mask)
        after = (subject.call(each, inputs, is_causal, None) for each in (second, module))
        yield max(moved(out, first[i]) for out in (*after, outs[i])), f"{is_causal=}"


@law_of_calls("inputs are left alone", 0.0)
def untouched(case: Case) -> Breaches:
    """The caller's tensors are as they were."""
    mask = padding_masks(case.length, case.inputs[0].device) if case.subject.padding else None
    arguments = case.inputs if mask is None else (*case.inputs, mask)
    copies = [x.double() + 0.0 for x in arguments]
    case.call(*case.inputs, mask=mask)
    yield all_moved((x.double() for x in arguments), copies), ""


REPEATED = "one sequence for all"
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of a tensor (..., tokens, width), with the same numbers
    "width before tokens": lambda x: x.mT.contiguous().mT,
    "tokens before heads": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    "between other numbers": lambda x: torch.stack([torch.full_like(x, float("nan")), x], -1)[..., 1],
    REPEATED: lambda x: x[:1].expand_as(x),
}


@law_of_calls("any memory layout")
def layouts(case: Case) -> Breaches:
    """Transposed, gapped and repeated inputs give what contiguous ones give, gradients included."""
    contiguous = with_gradients(case.call, case.inputs)
    for name, lay_out in LAYOUTS.items():
        for which in range(len(case.inputs) + 1):  # one input laid out so, or all
            inputs = [lay_out(x) if which in (n, len(case.inputs)) else x for n, x in enumerate(case.inputs)]
            copied = name == REPEATED
            expected = with_gradients(case.call, (x.contiguous() for x in inputs)) if copied else contiguous
            yield all_moved(with_gradients(case.call, inputs), expected), name


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
    """The results of jobs in threads of their own, in step before every layer of ``model`` or function of torch.

    Races over memory of a module or of the library rarely show by chance, so each thread waits for the others there,
    where all hold unfinished work.
    """
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


@law_of_calls("state_dict round trip")
def saved(case: Case) -> Breaches:
    """A state_dict loaded into another instance gives the same outputs, random features included."""
    claims(isinstance(case.module, nn.Module), "not a module")
    other = case.subject.built(seed=1, device=case.device)
    other.load_state_dict(case.module.state_dict())
    after = case.subject.call(other, case.inputs, case.is_causal, None)
    yield 1e3 * moved(after, case.call(*case.inputs)), "in thousandths"


@law_of_calls("torch.compile(fullgraph=True)")
def compiled(case: Case) -> Breaches:
    """torch.compile(fullgraph=True) traces it without a break and changes nothing."""
    claims(case.promises is None or case.promises.compile, "denied by its traits")
    torch.compiler.reset()
    run: Callable[..., Tensor] = torch.compile(case.subject.call, fullgraph=True, backend="eager")
    yield moved(run(case.module, case.inputs, case.is_causal, None), case.call(*case.inputs)), ""
