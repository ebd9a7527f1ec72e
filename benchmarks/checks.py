"""Check correctness before speed: ours must keep the laws of attention, and a peer's faults are listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.competitors import Peer, Sizes
from fast_attention import conformance
from fast_attention.conformance import AttentionUnderTest, Law, independence, robustness
from fast_attention.lab.refusals import failure

HEADS, WIDTH, LENGTH = 2, 64, 256
PEER_LAWS: tuple[Law, ...] = (
    independence.future, independence.padding, independence.batch,
    robustness.lengths, robustness.finite, robustness.untouched,
)  # fmt: skip
OTHER = "computes something else"
OFF = 1e-3  # relative rms beyond which a peer computes something else than it should


def ours(mechanism: Any, device: torch.device) -> list[str]:
    """The laws that one of ours breaks, or what it raises."""
    try:
        report = conformance.check(conformance.of(mechanism), device=str(device), laws=conformance.ESSENTIAL)
    except Exception as error:  # whatever a broken mechanism raises
        return [f"raised {failure(error)}"]
    return [f"{finding.law}: {finding.size:.2g}" for finding in report.broken]


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


def built(peer: Peer, length: int = LENGTH) -> Any:
    """A peer with seeded weights for the check's sizes."""
    torch.manual_seed(0)
    return peer.build(Sizes(HEADS, WIDTH, length))


def _off_truth(peer: Peer, module: Any) -> list[str]:
    shape = (2, HEADS, LENGTH, WIDTH) if peer.kind == "core" else (2, LENGTH, HEADS * WIDTH)
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
        module = peer.build(Sizes(HEADS, WIDTH, LENGTH))
        return module.eval() if isinstance(module, nn.Module) else module

    core = peer.kind == "core"
    return AttentionUnderTest(
        name=peer.name, make=make, call=call, inputs="qkv" if core else "x", heads=HEADS if core else 1,
        width=WIDTH if core else HEADS * WIDTH, length=LENGTH, causal=peer.is_causal,
        bidirectional=not peer.is_causal, padding=peer.mask is not None, dtype=torch.float32,
    )  # fmt: skip
