"""The laws find faults that are planted into a third party's attention, and call none broken that is only unusual."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import MultiheadAttention, conformance
from fast_attention.conformance import robustness


class Attention(nn.Module):
    """Exact attention by hand, with a weight; faults are planted into what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(16))
        self.memory: dict[int, Any] = {}

    def visible(self, length: int, is_causal: bool) -> Tensor:
        visible = torch.ones(length, length, dtype=torch.bool)
        return visible.tril() if is_causal else visible

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        visible = self.visible(q.shape[-2], is_causal)
        visible = visible if mask is None else visible & mask[:, None, None]
        return self.summed((q * self.factor @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf")), v)

    def summed(self, scores: Tensor, v: Tensor) -> Tensor:
        return scores.softmax(-1).masked_fill(scores == float("-inf"), 0.0) @ v


class InFloat32(Attention):
    def summed(self, scores: Tensor, v: Tensor) -> Tensor:
        weights = scores.softmax(-1, dtype=torch.float32).masked_fill(scores == float("-inf"), 0.0)
        return weights.to(v.dtype) @ v


class InFloat32Detached(InFloat32):
    def summed(self, scores: Tensor, v: Tensor) -> Tensor:
        return super().summed(scores, v) * (scores.detach() / scores.clamp(min=-1e4))[..., :1].nan_to_num()


class LeaksAtBorders(Attention):
    def visible(self, length: int, is_causal: bool) -> Tensor:
        visible = super().visible(length, is_causal)
        visible[7:-1:8] |= torch.eye(length, dtype=torch.bool).roll(1, -1)[7:-1:8]
        return visible


class LeaksWhereLong(Attention):
    def visible(self, length: int, is_causal: bool) -> Tensor:
        return super().visible(length, is_causal and length < 1_000)


class KeepsTheFirstMask(Attention):
    def visible(self, length: int, is_causal: bool) -> Tensor:
        return self.memory.setdefault(length, super().visible(length, is_causal))


class KeepsTheLastLength(Attention):
    def visible(self, length: int, is_causal: bool) -> Tensor:
        if self.memory.get(0) != (length, is_causal):
            self.memory[0] = length, is_causal
            self.memory[1] = super().visible(length, is_causal)
        return self.memory[1]


class WritesIntoItsOutputs(Attention):
    def forward(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = super().forward(q, *args, **kwargs)
        return self.memory.setdefault(len(q), out.detach().clone()).copy_(out.detach())


class TurnsTheMask(Attention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        out = super().forward(q, k, v, mask, is_causal)
        if mask is not None:
            mask.logical_not_()
        return out


class ForgetsAWeight(Attention):
    def forward(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (
            super().forward(q * self.factor.detach() / self.factor.detach() ** 2, *args, **kwargs) * self.factor.mean()
        )

    def summed(self, scores: Tensor, v: Tensor) -> Tensor:
        return super().summed(scores, v) * self.factor.detach()


class NaNUnderAutocast(Attention):
    def summed(self, scores: Tensor, v: Tensor) -> Tensor:
        return super().summed(scores, v) * (float("nan") if torch.is_autocast_enabled("cpu") else 1.0)


class NaNGradients(Attention):
    def summed(self, scores: Tensor, v: Tensor) -> Tensor:
        root = (self.factor - self.factor.detach()).square().sum().sqrt()  # 0, whose slope is 0 / 0
        return super().summed(scores, v) + root


class LosesRows(Attention):
    def summed(self, scores: Tensor, v: Tensor) -> Tensor:
        weights = scores.clamp(max=80.0).exp()
        return weights @ v / (weights.sum(-1, keepdim=True) + 1e-30)


FAULTS = [
    (LeaksAtBorders, "the future never moves the past"),
    (LeaksWhereLong, "the future never moves the past"),
    (KeepsTheFirstMask, "determinism"),
    (KeepsTheLastLength, "threads"),
    (WritesIntoItsOutputs, "determinism"),
    (TurnsTheMask, "inputs are left alone"),
    (ForgetsAWeight, "gradients"),
    (InFloat32Detached, "gradients"),
    (NaNGradients, "gradients"),
    (NaNUnderAutocast, "autocast"),
    (LosesRows, "finite at large inputs"),
]


@pytest.mark.parametrize(("kind", "broken"), FAULTS)
def test_a_planted_fault_is_found(kind: Callable[[], Any], broken: str) -> None:
    laws = [law for law in conformance.LAWS if law.name == broken]
    assert [finding.status for finding in conformance.check(conformance.third_party(kind), laws=laws).findings] == [
        "broken"
    ]


@pytest.mark.parametrize("kind", [Attention, InFloat32])
def test_what_is_only_unusual_is_not_broken(kind: Callable[[], Any]) -> None:
    laws = [law for law in conformance.LAWS if law is not robustness.compiled]
    report = conformance.check(conformance.third_party(kind), laws=laws)
    assert not report.broken, report


def encoder_layer(width: int, heads: int, batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(width, heads, 32, batch_first=batch_first)


def encoder(width: int, heads: int, batch_first: bool) -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(width, heads, batch_first), 2, enable_nested_tensor=False)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", [nn.MultiheadAttention, MultiheadAttention, encoder_layer, encoder])
def test_modules_of_torch_are_called_by_their_own_rules(kind: Callable[..., Any], first: bool) -> None:
    laws = [*conformance.ESSENTIAL, robustness.untouched, robustness.gradients]
    report = conformance.check(conformance.third_party(lambda: kind(16, 4, batch_first=first)), laws=laws)
    assert not report.broken, report
    claimed = {finding.law for finding in report.findings if finding.status == "kept"}
    assert {"the future never moves the past", "padding is inert", "padded = shorter"} <= claimed


def test_a_users_mechanism_by_its_module_is_held_to_what_it_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checked_of_a_user.py").write_text(
        "from fast_attention import LinearAttention\n\n\nclass Mine(LinearAttention):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    subject = conformance.resolve("checked_of_a_user:Mine")
    assert (subject.name, subject.padding) == ("Mine()", True)
    assert repr(subject.mechanism) == "Mine()"


def test_what_is_no_attention_under_test_is_refused() -> None:
    subject: Any = "Softmax"
    with pytest.raises(TypeError, match=r"subject comes from conformance.of\(mechanism\) or third_party"):
        conformance.check(subject)
    with pytest.raises(TypeError, match=r"laws are some of conformance.LAWS; got 'gradients'"):
        conformance.check(conformance.of("Softmax"), laws=["gradients"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="make is a function that gives a new module"):
        conformance.third_party(nn.Linear(16, 16))
