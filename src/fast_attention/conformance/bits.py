"""The law of bits: whether a sequence's outputs are the same to the last bit, however it is batched and split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fast_attention.conformance.finding import Finding, law, moved
from fast_attention.conformance.under_test import AttentionUnderTest
from fast_attention.invariance import batch_invariant
from fast_attention.mechanism import Unsupported

LENGTH = 23  # of ours, whose steps of one token take their time
Pair = tuple[str, Tensor, Tensor]


@law("same bits in any batch and split")
def bits(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Outputs are the same bits alone and in a batch, before later tokens and without them, decoded and in one pass.

    Ours must keep that within ``batch_invariant()``, or refuse by name. What differs without it, or in a third party's
    attention, is reported: few keep it, and nobody claims it.
    """
    mechanism = subject.mechanism
    module = subject.built(device=device, dtype=subject.dtype if mechanism is None else torch.float32)
    length = subject.length if mechanism is None else min(LENGTH, subject.length)
    inputs = tuple(x if mechanism is None else x.float() for x in subject.draw(length, batch=3, device=device))
    differ = _differences(subject, module, inputs, subject.modes)
    report = f"differ: {', '.join(differ)}" if differ else "all equal here"
    if mechanism is None:
        return Finding("not claimed" if differ else "kept", max(differ.values(), default=0.0), 0.0, report)
    refused = subject.causal and getattr(mechanism.traits, "memory", None) is None
    modes = [False] if refused else subject.modes
    with batch_invariant():
        broken = _differences(subject, module, inputs, modes, padded=subject.padding)
        if refused and not _refuses(subject, module, inputs):
            broken["causal calls, which are not refused"] = float("inf")
    if broken:
        return Finding("broken", max(broken.values()), 0.0, f"within batch_invariant() differ: {', '.join(broken)}")
    return Finding("kept", detail=f"within batch_invariant(){', causal refused' * refused}; without it {report}")


def _refuses(subject: AttentionUnderTest, module: Any, inputs: tuple[Tensor, ...]) -> bool:
    try:
        subject.call(module, inputs, True, None)
    except Unsupported as error:
        return type(subject.mechanism).__name__ in str(error)
    return False


def _differences(
    subject: AttentionUnderTest, module: Any, inputs: tuple[Tensor, ...], modes: list[bool], *, padded: bool = False
) -> dict[str, float]:
    """What should be one and the same and differs, and how far."""
    sizes: dict[str, float] = {}
    for is_causal in modes:
        whole = subject.call(module, inputs, is_causal, None)
        pairs = list(_batched(subject, module, inputs, whole, is_causal))
        if is_causal:
            pairs += _shortened(subject, module, inputs, whole, padded)
            if subject.mechanism is not None and subject.mechanism.traits.memory is not None:
                pairs += _decoded(module, inputs, whole)
        for name, ours, theirs in pairs:
            if not torch.equal(ours, theirs):
                sizes[name] = max(sizes.get(name, 0.0), moved(ours, theirs))
    return sizes


def _batched(
    subject: AttentionUnderTest, module: Any, inputs: tuple[Tensor, ...], whole: Tensor, is_causal: bool
) -> Iterator[Pair]:
    for i in (0, 2):
        alone = subject.call(module, tuple(x[i : i + 1] for x in inputs), is_causal, None)
        yield f"a {'causal ' * is_causal}batch", alone, whole[i : i + 1]


def _shortened(
    subject: AttentionUnderTest, module: Any, inputs: tuple[Tensor, ...], whole: Tensor, padded: bool
) -> Iterator[Pair]:
    length = whole.shape[-2]
    kept = length * 2 // 3
    shorter = subject.call(module, tuple(x[..., :kept, :] for x in inputs), True, None)
    yield "the beginning of more tokens", shorter, whole[..., :kept, :]
    if padded:
        mask = (torch.arange(length) < kept).expand(3, -1).to(whole.device)
        yield "a padded end", subject.call(module, inputs, True, mask)[..., :kept, :], shorter


def _decoded(module: Any, inputs: tuple[Tensor, ...], whole: Tensor) -> Iterator[Pair]:
    length = whole.shape[-2]
    for name, sizes in (("tokens one by one", [1] * length), ("a split", [5, 1, 11, length - 17])):
        state, outs, start = None, [], 0
        for size in sizes:
            out, state = module.decode(*(x[..., start : start + size, :] for x in inputs), state)
            outs.append(out)
            start += size
        yield f"decoding {name}", torch.cat(outs, -2), whole
