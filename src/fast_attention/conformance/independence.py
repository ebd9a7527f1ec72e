"""Laws of independence: what must not move an output, and what must."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fast_attention.conformance.finding import Breaches, claims, moved, rounding
from fast_attention.conformance.under_test import Case, law_of_calls, with_gradients

FACTORS = (6.0, -6.0, 60.0)
LONG = 1_100  # tokens
UNSEEN = "size counts outputs that do not move"


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


@law_of_calls("the future never moves the past", causal=True)
def future(case: Case) -> Breaches:
    """The future never moves the past: later tokens are replaced by ones 6, -6 and 60 times as large.

    They are so from any token on; of a long sequence from a few tokens on, for what runs at such lengths only, where
    the attention takes them.
    """
    yield from _moves(case, case.length, range(1, case.length), FACTORS)
    with suppress(Exception):  # a length it does not take is another law's business
        yield from _moves(case, LONG, (1, LONG // 3, LONG - 70, LONG - 1), FACTORS[:1])


def _moves(case: Case, length: int, starts: Sequence[int], factors: Sequence[float]) -> Breaches:
    """How far outputs move before each of ``starts``, from which on tokens are replaced, each in its own sequence."""
    inputs = tuple(x.repeat(len(starts), *[1] * (x.ndim - 1)) for x in case.draw(length, batch=1))
    before, positions = case.call(*inputs), torch.arange(length, device=inputs[0].device)
    for factor in factors:
        later = positions >= positions[list(starts), None]
        after = case.call(*_changed(inputs, later, factor))
        for i, t in enumerate(starts):
            size = moved(_tokens(after[i], 0, t), _tokens(before[i], 0, t))
            yield size, f"tokens from {t} on of {length} replaced by ones {factor:g} times as large"


@law_of_calls(
    "an enormous future leaves the past alone", 10 * rounding(torch.float32), causal=True, dtype=torch.float32
)
def enormous(case: Case) -> Breaches:
    """Finite future keys or values of 1e19, whose squares fit no float32: the past's outputs and gradients stay."""
    for t in sorted({1, case.length // 2, case.length - 1}):

        def past(inputs: Sequence[Tensor], t: int = t) -> list[Tensor]:
            """Outputs before token t, and the gradients there."""
            return [_tokens(x, 0, t) for x in with_gradients(lambda *x: _tokens(case.call(*x), 0, t), inputs)]

        before = past(case.inputs)
        least = 1e-3 * max(float(x.abs().max()) for x in before)  # gradients that cancel to nothing are rounding
        for which in (1, 2) if len(case.inputs) == 3 else (0,):
            for value in (1e19, -1e19):
                inputs = [x.clone() for x in case.inputs]
                inputs[which][..., t:, :] = value
                at = f"tokens from {t} on are {value:g} in {('qkv' if len(inputs) > 1 else 'x')[which]}"
                for a, b in zip(past(inputs), before, strict=True):
                    yield float((a - b).abs().max() / b.abs().max().clamp_min(least)), at


@law_of_calls("the past is seen", 0.0, causal=True)
def past(case: Case) -> Breaches:
    """The past is seen: other early tokens give other late outputs."""
    half = case.length // 2
    early = (torch.arange(case.length, device=case.inputs[0].device) < half).expand(2, -1)
    after, before = case.call(*_changed(case.inputs, early, 1.0)), case.call(*case.inputs)
    yield unseen(_tokens(after, half), _tokens(before, half)), UNSEEN


def unseen(after: Tensor, before: Tensor) -> float:
    """1 where outputs do not move, up to a millionth; else 0."""
    return float(moved(after, before) <= 1e-6)


def padding_masks(length: int, device: torch.device) -> Tensor:
    """Key masks (2, L): one sequence padded at its end, one with masked keys in between."""
    positions = torch.arange(length, device=device)
    return torch.stack([positions < length - length // 3, (positions % 3 != 1) | (positions == 0)])


@law_of_calls("padding is inert")
def padding(case: Case) -> Breaches:
    """Padding is inert: whatever masked tokens hold, nothing that may be seen moves."""
    claims(case.subject.padding, "takes no key mask")
    mask = padding_masks(case.length, case.inputs[0].device)
    before = _visible(case.call(*case.inputs, mask=mask), mask)
    for factor in (*FACTORS, 1e4):
        after = _visible(case.call(*_changed(case.inputs, ~mask, factor), mask=mask), mask)
        yield moved(after, before), f"masked tokens replaced by ones {factor:g} times as large"


def _visible(out: Tensor, mask: Tensor) -> Tensor:
    return out.movedim(-2, 1)[mask]


def _like_alone(case: Case, visible: Tensor, at: str) -> Breaches:
    """The tokens that ``visible`` (B, L) leaves of every sequence, beside the same sequence without the others."""
    claims(case.subject.shrinks, "laid out over the padded length")
    claims(case.subject.padding, "takes no key mask")
    try:
        alone = [case.call(*(x[i : i + 1, ..., row, :] for x in case.inputs)) for i, row in enumerate(visible)]
    except (AssertionError, RuntimeError):
        return  # a length it does not take is another law's business
    out = case.call(*case.inputs, mask=visible)
    for i, row in enumerate(visible):
        yield moved(out[i : i + 1, ..., row, :], alone[i]), at


@law_of_calls("padded = shorter")
def shorter(case: Case) -> Breaches:
    """A padded input gives what the shorter input gives."""
    length, positions = case.length, torch.arange(case.length, device=case.inputs[0].device)
    for number in sorted({1, length // 2, length - 1}):
        yield from _like_alone(case, (positions < number).expand(2, -1), f"{number} of {length} tokens")


@law_of_calls("padded in front = shorter")
def front(case: Case) -> Breaches:
    """A sequence padded in front gives what the shorter one gives, beside one that is not padded."""
    claims(case.promises is None or case.promises.positions != "grid", "its positions are places in a grid")
    length, positions = case.length, torch.arange(case.length, device=case.inputs[0].device)
    for hidden in sorted({1, length // 3, length - 1}):
        visible = torch.stack([positions >= hidden, positions >= 0])
        yield from _like_alone(case, visible, f"the first {hidden} of {length} tokens hidden")


@law_of_calls("nothing to see gives zeros", 0.0)
def empty(case: Case) -> Breaches:
    """A query that may see nothing gets zeros."""
    claims(case.subject.padding, "takes no key mask")
    claims(case.subject.inputs != "x", "mixes whole tokens")
    mask = torch.ones(2, case.length, dtype=torch.bool, device=case.inputs[0].device)
    mask[1] = False
    out = case.call(*case.inputs, mask=mask)
    yield out[1].detach().abs().max().item(), "largest output of a sequence masked throughout"


@law_of_calls("batch and heads are independent")
def batch(case: Case) -> Breaches:
    """A sequence does not notice its neighbours in the batch, nor a head the other heads."""
    inputs = case.draw(case.length, batch=3)
    whole = case.call(*inputs)
    yield moved(case.call(*(x[1:2] for x in inputs)), whole[1:2]), "alone"
    loud = (torch.cat([60 * x[:1], x[1:2], -60 * x[2:]]) for x in inputs)
    yield moved(case.call(*loud)[1:2], whole[1:2]), "among loud neighbours"
    if case.subject.inputs == "qkv" and case.subject.heads > 1:
        heads = (torch.cat([x[:, :1], 60 * x[:, 1:]], 1) for x in inputs)
        yield moved(case.call(*heads)[:, :1], whole[:, :1]), "beside a loud head"
