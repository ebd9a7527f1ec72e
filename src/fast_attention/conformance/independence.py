"""Laws of independence: what must not move an output, and what must."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fast_attention.conformance.finding import Finding, judged, law, moved, rounding, unclaimed
from fast_attention.conformance.under_test import AttentionUnderTest

FACTORS = (6.0, -6.0, 60.0)
LONG = 1_100  # tokens


def _tokens(x: Tensor, start: int, stop: int | None = None) -> Tensor:
    return x[..., start:stop, :]


def _changed(inputs: tuple[Tensor, ...], replaced: Tensor, factor: float, seed: int = 1) -> tuple[Tensor, ...]:
    """The inputs with the tokens ``replaced`` (B, L) replaced by random ones, ``factor`` times as large."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for x in inputs:
        other = factor * (x + torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x))
        out.append(torch.where(replaced.view(replaced.shape[0], *[1] * (x.ndim - 3), replaced.shape[1], 1), other, x))
    return tuple(out)


@law("the future never moves the past")
def future(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """The future never moves the past: later tokens are replaced by ones 6, -6 and 60 times as large.

    They are so from any token on; of a long sequence from a few tokens on, for what runs at such lengths only, where
    the attention takes them.
    """
    if not subject.causal:
        return unclaimed("not causal")
    module = subject.built(device=device)
    moves = _moves(subject, module, device, subject.length, range(1, subject.length), FACTORS)
    with suppress(Exception):  # a length it does not take is another law's business
        moves |= _moves(subject, module, device, LONG, (1, LONG // 3, LONG - 70, LONG - 1), FACTORS[:1])
    at, worst = max(moves.items(), key=lambda move: move[1], default=("", 0.0))
    return judged(worst, rounding(subject.dtype), at)


def _moves(
    subject: AttentionUnderTest, module: Any, device: str, length: int, starts: Sequence[int], factors: Sequence[float]
) -> dict[str, float]:
    """How far outputs move before each of ``starts``, from which on tokens are replaced, each in its own sequence."""
    drawn = subject.draw(length, batch=1, device=device)
    inputs = tuple(x.repeat(len(starts), *[1] * (x.ndim - 1)) for x in drawn)
    positions = torch.arange(length, device=drawn[0].device)
    before, moves = subject.call(module, inputs, True, None), {}
    for factor in factors:
        later = positions >= positions[list(starts), None]
        after = subject.call(module, _changed(inputs, later, factor), True, None)
        for i, t in enumerate(starts):
            size = moved(_tokens(after[i], 0, t), _tokens(before[i], 0, t))
            moves[f"tokens from {t} on of {length} replaced by ones {factor:g} times as large"] = size
    return moves


@law("an enormous future leaves the past alone")
def enormous(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Finite future keys or values of 1e19, whose squares fit no float32: the past's outputs and gradients stay."""
    if not subject.causal:
        return unclaimed("not causal")
    module, length, worst, at = subject.built(dtype=torch.float32, device=device), subject.length, 0.0, ""
    drawn = [x.float() for x in subject.draw(length, device=device)]
    for t in sorted({1, length // 2, length - 1}):
        before = _of_the_past(subject, module, drawn, t)
        least = 1e-3 * max(float(x.abs().max()) for x in before)  # gradients that cancel to nothing are rounding
        for which in (1, 2) if len(drawn) == 3 else (0,):
            for value in (1e19, -1e19):
                inputs = [x.clone() for x in drawn]
                inputs[which][..., t:, :] = value
                after = _of_the_past(subject, module, inputs, t)
                pairs = zip(after, before, strict=True)
                changes = [float((a - b).abs().max() / b.abs().max().clamp_min(least)) for a, b in pairs]
                size = max(x if x == x else float("inf") for x in changes)
                if size > worst:
                    worst, at = size, f"tokens from {t} on are {value:g} in {('qkv' if len(drawn) > 1 else 'x')[which]}"
    return judged(worst, 10 * rounding(torch.float32), at)


def _of_the_past(subject: AttentionUnderTest, module: object, inputs: list[Tensor], t: int) -> list[Tensor]:
    """Outputs before token t, and the gradients there of a sum of them."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = _tokens(subject.call(module, tuple(leaves), True, None), 0, t)
    gradients = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    return [out.detach(), *(_tokens(x, 0, t) for x in gradients if x is not None)]


@law("the past is seen")
def past(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """The past is seen: other early tokens give other late outputs."""
    if not subject.causal:
        return unclaimed("not causal")
    module, length = subject.built(device=device), subject.length
    inputs = subject.draw(length, device=device)
    where = (torch.arange(length) < length // 2).expand(2, -1).to(inputs[0].device)
    before = subject.call(module, inputs, True, None)
    after = subject.call(module, _changed(inputs, where, 1.0), True, None)
    size = moved(_tokens(after, length // 2), _tokens(before, length // 2))
    least = 1e-6
    return Finding("kept" if size > least else "broken", size, least, "smallest change that counts as seeing")


def padding_masks(length: int, device: torch.device) -> Tensor:
    """Key masks (2, L): one sequence padded at its end, one with masked keys in between."""
    positions = torch.arange(length, device=device)
    return torch.stack([positions < length - length // 3, (positions % 3 != 1) | (positions == 0)])


@law("padding is inert")
def padding(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Padding is inert: whatever masked tokens hold, nothing that may be seen moves."""
    if not subject.padding:
        return unclaimed("takes no key mask")
    module, length = subject.built(device=device), subject.length
    inputs = subject.draw(length, device=device)
    mask, worst, at = padding_masks(length, inputs[0].device), 0.0, ""
    for is_causal in subject.modes:
        before = _visible(subject.call(module, inputs, is_causal, mask), mask)
        for factor in (*FACTORS, 1e4):
            after = _visible(subject.call(module, _changed(inputs, ~mask, factor), is_causal, mask), mask)
            size = moved(after, before)
            if size > worst:
                worst, at = size, f"masked tokens replaced by ones {factor:g} times as large, is_causal={is_causal}"
    return judged(worst, rounding(subject.dtype), at)


def _visible(out: Tensor, mask: Tensor) -> Tensor:
    return out.movedim(-2, 1)[mask]


@law("padded = shorter")
def shorter(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """A padded input gives what the shorter input gives."""
    if not subject.padding or not subject.shrinks:
        return unclaimed("takes no key mask" if subject.shrinks else "laid out over the padded length")
    module, length = subject.built(device=device), subject.length
    inputs = subject.draw(length, device=device)
    worst, at = 0.0, ""
    for kept in sorted({1, length // 2, length - 1}):
        mask = (torch.arange(length) < kept).expand(2, -1).to(inputs[0].device)
        for is_causal in subject.modes:
            try:
                short = subject.call(module, tuple(_tokens(x, 0, kept) for x in inputs), is_causal, None)
            except (AssertionError, RuntimeError):
                continue  # a length it does not take is another law's business
            size = moved(_tokens(subject.call(module, inputs, is_causal, mask), 0, kept), short)
            if size > worst:
                worst, at = size, f"{kept} of {length} tokens, is_causal={is_causal}"
    return judged(worst, rounding(subject.dtype), at)


@law("padded in front = shorter")
def front(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """A sequence padded in front gives what the shorter one gives, beside one that is not padded."""
    if not subject.padding or not subject.shrinks:
        return unclaimed("takes no key mask" if subject.shrinks else "laid out over the padded length")
    if subject.mechanism is not None and subject.mechanism.traits.positions == "grid":
        return unclaimed("its positions are places in a grid")
    module, length = subject.built(device=device), subject.length
    inputs, worst, at = subject.draw(length, device=device), 0.0, ""
    for hidden in sorted({1, length // 3, length - 1}):
        mask = torch.ones(2, length, dtype=torch.bool, device=inputs[0].device)
        mask[0, :hidden] = False
        for is_causal in subject.modes:
            try:
                short = subject.call(module, tuple(_tokens(x[:1], hidden) for x in inputs), is_causal, None)
            except (AssertionError, RuntimeError):
                continue  # a length it does not take is another law's business
            out = subject.call(module, inputs, is_causal, mask)
            whole = subject.call(module, tuple(x[1:] for x in inputs), is_causal, None)
            size = max(moved(_tokens(out[:1], hidden), short), moved(out[1:], whole))
            if size > worst:
                worst, at = size, f"the first {hidden} of {length} tokens hidden, is_causal={is_causal}"
    return judged(worst, rounding(subject.dtype), at)


@law("nothing to see gives zeros")
def empty(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """A query that may see nothing gets zeros."""
    if not subject.padding or subject.inputs == "x":
        return unclaimed("takes no key mask" if not subject.padding else "mixes whole tokens")
    module = subject.built(device=device)
    inputs = subject.draw(subject.length, device=device)
    mask = torch.ones(2, subject.length, dtype=torch.bool, device=inputs[0].device)
    mask[1] = False
    worst = 0.0
    for is_causal in subject.modes:
        out = subject.call(module, inputs, is_causal, mask)
        size = out[1].detach().abs().max().item()
        worst = max(worst, size if size == size else float("inf"))
    return judged(worst, 0.0, "largest output of a sequence masked throughout")


@law("batch and heads are independent")
def batch(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """A sequence does not notice its neighbours in the batch, nor a head the other heads."""
    module, inputs = subject.built(device=device), subject.draw(subject.length, batch=3, device=device)
    worst, at = 0.0, ""
    for is_causal in subject.modes:
        together = subject.call(module, inputs, is_causal, None)
        alone = subject.call(module, tuple(x[1:2] for x in inputs), is_causal, None)
        loud = tuple(torch.cat([60 * x[:1], x[1:2], -60 * x[2:]]) for x in inputs)
        other = subject.call(module, loud, is_causal, None)
        sizes = {"alone": moved(alone, together[1:2]), "among loud neighbours": moved(other[1:2], together[1:2])}
        if subject.inputs == "qkv" and subject.heads > 1:
            heads = tuple(torch.cat([x[:, :1], 60 * x[:, 1:]], 1) for x in inputs)
            sizes["beside a loud head"] = moved(subject.call(module, heads, is_causal, None)[:, :1], together[:, :1])
        at, worst = max([(at, worst), *sizes.items()], key=lambda pair: pair[1])
    return judged(worst, rounding(subject.dtype), at)
