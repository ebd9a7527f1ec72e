"""Laws of independence: what must not move an output, and what must."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fast_attention.conformance.finding import Breaches, Finding, claims, law, moved, rounding
from fast_attention.conformance.under_test import AttentionUnderTest, with_gradients

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
def future(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """The future never moves the past: later tokens are replaced by ones 6, -6 and 60 times as large.

    They are so from any token on; of a long sequence from a few tokens on, for what runs at such lengths only, where
    the attention takes them.
    """
    claims(subject.causal, "not causal")
    module = subject.built(device=device)
    yield from _moves(subject, module, device, subject.length, range(1, subject.length), FACTORS)
    with suppress(Exception):  # a length it does not take is another law's business
        yield from _moves(subject, module, device, LONG, (1, LONG // 3, LONG - 70, LONG - 1), FACTORS[:1])


def _moves(
    subject: AttentionUnderTest, module: Any, device: str, length: int, starts: Sequence[int], factors: Sequence[float]
) -> Breaches:
    """How far outputs move before each of ``starts``, from which on tokens are replaced, each in its own sequence."""
    drawn = subject.draw(length, batch=1, device=device)
    inputs = tuple(x.repeat(len(starts), *[1] * (x.ndim - 1)) for x in drawn)
    positions = torch.arange(length, device=drawn[0].device)
    before = subject.call(module, inputs, True, None)
    for factor in factors:
        later = positions >= positions[list(starts), None]
        after = subject.call(module, _changed(inputs, later, factor), True, None)
        for i, t in enumerate(starts):
            size = moved(_tokens(after[i], 0, t), _tokens(before[i], 0, t))
            yield size, f"tokens from {t} on of {length} replaced by ones {factor:g} times as large"


@law("an enormous future leaves the past alone", 10 * rounding(torch.float32))
def enormous(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """Finite future keys or values of 1e19, whose squares fit no float32: the past's outputs and gradients stay."""
    claims(subject.causal, "not causal")
    module, length = subject.built(dtype=torch.float32, device=device), subject.length
    drawn = [x.float() for x in subject.draw(length, device=device)]
    for t in sorted({1, length // 2, length - 1}):

        def past(inputs: list[Tensor], t: int = t) -> list[Tensor]:
            """Outputs before token t, and the gradients there."""
            outputs = with_gradients(lambda *x: _tokens(subject.call(module, x, True, None), 0, t), inputs)
            return [_tokens(x, 0, t) for x in outputs]

        before = past(drawn)
        least = 1e-3 * max(float(x.abs().max()) for x in before)  # gradients that cancel to nothing are rounding
        for which in (1, 2) if len(drawn) == 3 else (0,):
            for value in (1e19, -1e19):
                inputs = [x.clone() for x in drawn]
                inputs[which][..., t:, :] = value
                at = f"tokens from {t} on are {value:g} in {('qkv' if len(drawn) > 1 else 'x')[which]}"
                for a, b in zip(past(inputs), before, strict=True):
                    yield float((a - b).abs().max() / b.abs().max().clamp_min(least)), at


@law("the past is seen")
def past(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """The past is seen: other early tokens give other late outputs."""
    claims(subject.causal, "not causal")
    module, length = subject.built(device=device), subject.length
    inputs = subject.draw(length, device=device)
    where = (torch.arange(length) < length // 2).expand(2, -1).to(inputs[0].device)
    before = subject.call(module, inputs, True, None)
    after = subject.call(module, _changed(inputs, where, 1.0), True, None)
    return seen(_tokens(after, length // 2), _tokens(before, length // 2))


def seen(after: Tensor, before: Tensor) -> Finding:
    """Kept where later outputs move at all."""
    size, least = moved(after, before), 1e-6
    return Finding("kept" if size > least else "broken", size, least, "smallest change that counts as seeing")


def padding_masks(length: int, device: torch.device) -> Tensor:
    """Key masks (2, L): one sequence padded at its end, one with masked keys in between."""
    positions = torch.arange(length, device=device)
    return torch.stack([positions < length - length // 3, (positions % 3 != 1) | (positions == 0)])


@law("padding is inert")
def padding(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """Padding is inert: whatever masked tokens hold, nothing that may be seen moves."""
    claims(subject.padding, "takes no key mask")
    module, length = subject.built(device=device), subject.length
    inputs = subject.draw(length, device=device)
    mask = padding_masks(length, inputs[0].device)
    for is_causal in subject.modes:
        before = _visible(subject.call(module, inputs, is_causal, mask), mask)
        for factor in (*FACTORS, 1e4):
            after = _visible(subject.call(module, _changed(inputs, ~mask, factor), is_causal, mask), mask)
            yield moved(after, before), f"masked tokens replaced by ones {factor:g} times as large, {is_causal=}"


def _visible(out: Tensor, mask: Tensor) -> Tensor:
    return out.movedim(-2, 1)[mask]


def _claims_to_shrink(subject: AttentionUnderTest) -> None:
    claims(subject.shrinks, "laid out over the padded length")
    claims(subject.padding, "takes no key mask")


@law("padded = shorter")
def shorter(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """A padded input gives what the shorter input gives."""
    _claims_to_shrink(subject)
    module, length = subject.built(device=device), subject.length
    inputs = subject.draw(length, device=device)
    for number in sorted({1, length // 2, length - 1}):
        mask = (torch.arange(length) < number).expand(2, -1).to(inputs[0].device)
        for is_causal in subject.modes:
            try:
                short = subject.call(module, tuple(_tokens(x, 0, number) for x in inputs), is_causal, None)
            except (AssertionError, RuntimeError):
                continue  # a length it does not take is another law's business
            out = subject.call(module, inputs, is_causal, mask)
            yield moved(_tokens(out, 0, number), short), f"{number} of {length} tokens, {is_causal=}"


@law("padded in front = shorter")
def front(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """A sequence padded in front gives what the shorter one gives, beside one that is not padded."""
    _claims_to_shrink(subject)
    mechanism = subject.mechanism
    claims(mechanism is None or mechanism.traits.positions != "grid", "its positions are places in a grid")
    module, length = subject.built(device=device), subject.length
    inputs = subject.draw(length, device=device)
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
            yield size, f"the first {hidden} of {length} tokens hidden, {is_causal=}"


@law("nothing to see gives zeros", 0.0)
def empty(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """A query that may see nothing gets zeros."""
    claims(subject.padding, "takes no key mask")
    claims(subject.inputs != "x", "mixes whole tokens")
    module = subject.built(device=device)
    inputs = subject.draw(subject.length, device=device)
    mask = torch.ones(2, subject.length, dtype=torch.bool, device=inputs[0].device)
    mask[1] = False
    for is_causal in subject.modes:
        out = subject.call(module, inputs, is_causal, mask)
        yield out[1].detach().abs().max().item(), "largest output of a sequence masked throughout"


@law("batch and heads are independent")
def batch(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """A sequence does not notice its neighbours in the batch, nor a head the other heads."""
    module, inputs = subject.built(device=device), subject.draw(subject.length, batch=3, device=device)
    for is_causal in subject.modes:
        whole = subject.call(module, inputs, is_causal, None)
        alone = subject.call(module, tuple(x[1:2] for x in inputs), is_causal, None)
        yield moved(alone, whole[1:2]), "alone"
        loud = tuple(torch.cat([60 * x[:1], x[1:2], -60 * x[2:]]) for x in inputs)
        yield moved(subject.call(module, loud, is_causal, None)[1:2], whole[1:2]), "among loud neighbours"
        if subject.inputs == "qkv" and subject.heads > 1:
            heads = tuple(torch.cat([x[:, :1], 60 * x[:, 1:]], 1) for x in inputs)
            yield moved(subject.call(module, heads, is_causal, None)[:, :1], whole[:, :1]), "beside a loud head"
