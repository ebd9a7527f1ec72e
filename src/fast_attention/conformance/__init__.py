"""Laws that any attention can be tested against, ours or third-party.

    from fast_attention import conformance
    report = conformance.check(conformance.of("FavorPlus(num_features=64)"))
    report = conformance.check(conformance.third_party(lambda: MyAttention(dim=64, heads=4), width=64))
    report = conformance.check_model(transformer)
    print(report)

A ``Law`` called with an ``AttentionUnderTest`` gives a ``Finding``: kept, broken or not claimed, with the measured size
of the breach. ``LAWS`` lists them in the order in which ``check`` runs them; the first, ``ESSENTIAL``, are those
without which a number means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fast_attention.conformance import independence, promises, robustness, whole_model
from fast_attention.conformance.finding import Finding as Finding
from fast_attention.conformance.finding import Law as Law
from fast_attention.conformance.under_test import AttentionUnderTest as AttentionUnderTest
from fast_attention.conformance.under_test import of as of
from fast_attention.conformance.under_test import resolve as resolve
from fast_attention.conformance.under_test import third_party as third_party
from fast_attention.refusals import is_module

ESSENTIAL: tuple[Law, ...] = (
    independence.future,
    independence.past,
    independence.padding,
    independence.shorter,
    independence.front,
    independence.empty,
    independence.batch,
    robustness.lengths,
    robustness.finite,
    robustness.gradients,
)
LAWS: tuple[Law, ...] = (
    *ESSENTIAL,
    independence.enormous,
    robustness.precision,
    robustness.autocast,
    robustness.backward_autocast,
    robustness.repeats,
    robustness.untouched,
    robustness.layouts,
    robustness.threads,
    robustness.saved,
    robustness.compiled,
    promises.poisoned,
    promises.decoding,
    promises.few,
    promises.packed,
    promises.combining,
    promises.transforms,
    promises.order,
    promises.refusals,
    promises.exported,
)


@dataclass(frozen=True)
class LawReport:
    """The findings of all laws about one attention or model. Print it."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The laws it breaks."""
        return tuple(finding for finding in self.findings if finding.status == "broken")

    def __str__(self) -> str:
        rows = [f"{f.status:>11}  {f.law:<32} {f.size:10.2e} (limit {f.limit:.0e})  {f.detail}" for f in self.findings]
        return "\n".join([self.subject, *rows])


def check(subject: AttentionUnderTest, *, device: str = "cpu", laws: Iterable[Law] = LAWS) -> LawReport:
    """Run the laws on an attention.

    Args:
        subject: From ``of`` (ours), ``third_party`` (any module or function), or an ``AttentionUnderTest`` by hand.
        device: Where to run.
        laws: Which laws, all by default.

    Raises:
        TypeError: ``subject`` or ``laws`` are something else.
    """
    if not isinstance(subject, AttentionUnderTest):
        raise TypeError(f"subject comes from conformance.of(mechanism) or third_party(make); got {subject!r}")
    laws = tuple(laws)
    if wrong := [law for law in laws if not isinstance(law, Law)]:
        raise TypeError(f"laws are some of conformance.LAWS; got {wrong[0]!r}")
    return LawReport(subject.name, tuple(law(subject, device) for law in laws))


@torch.no_grad()
def check_model(
    model: nn.Module, *, causal: bool | None = None, length: int = whole_model.LENGTH
) -> LawReport:  # fmt: skip
    """Run the laws on a whole model of tokens, swapped or not; a broken law names the layer that breaks it.

    Args:
        model: A Hugging Face model (not encoder-decoder), or any module whose ``forward(tokens, key_mask=None)`` gives
            an output (B, L, ...) for each token. A method ``decode(tokens, state)``, if there is one, gives the outputs
            of new tokens and the next state. It is judged in evaluation mode and left as it was.
        causal: Of a module of your own, whether later tokens must not move earlier outputs; None for transformers'.
        length: Tokens of a sequence, for a module of your own that reads few.

    Raises:
        ValueError: It is neither.
        TypeError: It is no ``nn.Module``, such as a name.
    """
    is_module("model", model)
    subject = whole_model.of(model, causal=causal, length=length)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return LawReport(subject.name, tuple(law(subject) for law in whole_model.LAWS))
    finally:
        for module, training in modes.items():
            module.training = training


__all__ = [
    "AttentionUnderTest", "ESSENTIAL", "Finding", "LAWS", "Law", "LawReport", "check", "check_model", "of",
    "resolve", "third_party",
]  # fmt: skip
