"""Checks correctness before speed: ours must be right, and a peer's faults are listed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention import conformance
from fast_attention.conformance import AttentionUnderTest, Law, independence, robustness
from fast_attention.conformance.finding import moved
from fast_attention.lab.bench.competitors import Peer, Sizes
from fast_attention.lab.refusals import failure
from fast_attention.mechanism import Mixer, Shape
from fast_attention.nn.bound import Bound

LENGTH = 521  # a prime above every block and window
HEADS, WIDTH = 2, 64
PEER_LENGTH = 256
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
PEER_LAWS: tuple[Law, ...] = (
    independence.future, independence.padding, independence.batch,
    robustness.lengths, robustness.finite, robustness.untouched,
)  # fmt: skip
OTHER = "computes something else"
OFF = 1e-3  # relative rms beyond which a peer computes something else than it should


def broken(mechanism: Any, device: torch.device) -> list[str]:
    """The laws that one of ours breaks."""
    report = conformance.check(conformance.of(mechanism), device=str(device), laws=conformance.ESSENTIAL)
    return [f"{finding.law}: {finding.size:.2g}" for finding in report.broken]


def differences(mechanism: Any, is_causal: bool, device: torch.device) -> list[str]:
    """Where one of ours differs from its plain definition."""
    try:
        return list(_differences(mechanism, is_causal, device))
    except Exception as error:  # whatever a broken mechanism raises
        return [f"raised {failure(error)}"]


def _differences(mechanism: Any, is_causal: bool, device: torch.device) -> Iterable[str]:
    """The eager path in float64 and float32 against the plain path in float64, at an odd length above all blocks.

    ``torch.func`` makes a mechanism take its plain, traceable path, whose gradient is autograd's.
    """
    torch.manual_seed(0)
    bound = Bound(mechanism, Shape(HEADS, WIDTH, LENGTH)).to(device, torch.float64)
    for parameter in bound.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    shape = (1, LENGTH, HEADS * WIDTH) if isinstance(mechanism, Mixer) else (1, HEADS, LENGTH, WIDTH)
    drawn = [torch.randn(shape, dtype=torch.float64) for _ in range(1 if isinstance(mechanism, Mixer) else 3)]
    inputs = [x.to(device).requires_grad_() for x in drawn]

    def call(*tensors: Tensor) -> Tensor:
        return bound(*tensors, is_causal=is_causal)

    traced: Any = torch.func.vjp(call, *inputs)
    plain, vjp = traced
    seed = torch.randn_like(plain)
    fast = call(*inputs)
    yield from _if_off("differs from its plain path", moved(fast, plain), TOLERANCE[torch.float64])
    gradients = torch.autograd.grad(fast, inputs, seed, allow_unused=True)
    for number, (gradient, expected) in enumerate(zip(gradients, vjp(seed), strict=True)):
        gradient = torch.zeros_like(expected) if gradient is None else gradient
        size = (gradient - expected).norm() / expected.norm().clamp_min(1e-30)
        yield from _if_off(f"gradient of input {number} differs from autograd's", size.item(), 1e-7)
    with torch.no_grad():
        single = bound.to(torch.float32)(*(x.float() for x in inputs), is_causal=is_causal)
        size = ((single.double() - fast).norm() / fast.norm()).item()
        yield from _if_off("float32 differs from float64", size, TOLERANCE[torch.float32])
        if is_causal:
            yield from _future(bound, [x.detach().float() for x in inputs], single)


def _future(bound: Bound, inputs: list[Tensor], before: Tensor) -> Iterable[str]:
    """Later tokens, 60 times as large, must not move earlier outputs."""
    at, axis = LENGTH // 2, -2
    for x in inputs:
        x.narrow(axis, at, LENGTH - at).mul_(60.0)
    after = bound(*inputs, is_causal=True)
    yield from _if_off("the future leaks", moved(after.narrow(axis, 0, at), before.narrow(axis, 0, at)), 1e-4)


def _if_off(what: str, size: float, limit: float) -> list[str]:
    return [] if size <= limit else [f"{what}: {size:.2g}, more than {limit:.0e}"]


def peer(peer: Peer) -> tuple[str, list[str]]:
    """``right``, ``faulty`` or ``missing``, and why: its true formula where there is one, and the laws."""
    try:
        module = built(peer)
    except ImportError as error:
        return "missing", [f"{peer.package} is not installed ({failure(error)})"]
    except Exception as error:  # whatever a peer raises on this torch
        return "faulty", [f"cannot be built: {failure(error)}"]
    faults = _off_truth(peer, module) if peer.truth is not None else []
    report = conformance.check(under_test(peer), laws=PEER_LAWS)
    faults += [f"breaks '{f.law}'{_size(f.size, f.detail)}" for f in report.broken]
    return ("faulty" if faults else "right"), faults


def _size(size: float, detail: str) -> str:
    return f" ({size:.2g})" if 0 < size < float("inf") else f" ({detail})" if detail else ""


def built(peer: Peer, length: int = PEER_LENGTH) -> Any:
    """A peer with seeded weights for the check's sizes."""
    torch.manual_seed(0)
    return peer.build(Sizes(HEADS, WIDTH, length))


def _off_truth(peer: Peer, module: Any) -> list[str]:
    shape = (2, HEADS, PEER_LENGTH, WIDTH) if peer.kind == "core" else (2, PEER_LENGTH, HEADS * WIDTH)
    torch.manual_seed(1)
    inputs = [torch.randn(shape) for _ in range(3 if peer.kind == "core" else 1)]
    truth: Callable[..., Tensor] = peer.truth  # type: ignore[assignment]
    try:
        with torch.no_grad():
            output = module(*(x.clone() for x in inputs)).double()
            expected = truth(module, *(x.double() for x in inputs))
    except Exception as error:  # whatever a peer raises on this torch
        return [f"raises {failure(error)}"]
    size = ((output - expected).norm() / expected.norm()).item()
    fault = f"{OTHER} than its definition (off by {100 * size:.2g} % at inputs of unit variance)"
    return [] if size <= OFF else [fault]


def under_test(peer: Peer) -> AttentionUnderTest:
    """A peer as an attention under test."""

    def call(module: Any, inputs: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None) -> Tensor:
        options = {} if peer.mask is None or key_mask is None else {peer.mask: key_mask}
        with torch.random.fork_rng():
            torch.manual_seed(5)  # who draws at every call draws the same
            return module(*inputs, **options)

    def make() -> Any:
        module = peer.build(Sizes(HEADS, WIDTH, PEER_LENGTH))
        return module.eval() if isinstance(module, nn.Module) else module

    core = peer.kind == "core"
    return AttentionUnderTest(
        name=peer.name, make=make, call=call, inputs="qkv" if core else "x", heads=HEADS if core else 1,
        width=WIDTH if core else HEADS * WIDTH, length=PEER_LENGTH, causal=peer.is_causal,
        bidirectional=not peer.is_causal, padding=peer.mask is not None, dtype=torch.float32,
    )  # fmt: skip
