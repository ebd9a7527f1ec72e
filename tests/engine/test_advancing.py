"""Many new tokens behind a state: outputs, states and gradients of one pass, in the memory of a causal call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fast_attention import Shape, catalogue
from fast_attention.counting import peak_bytes
from fast_attention.engine import advancing, trace
from tests.cases import qkv, some_keys

WALKED = [
    "LearnedFeatures()", "FavorPlus(num_features=16, kernel=Relu())", "Favor(num_features=8)",
    "LinearAttention(Exp())", "LinearAttention(Taylor())", "LogAttention()", "LogAttention(normalize='none')",
    "LogAttention(normalize='softmax')", "LogAttention(score='logdot', normalize='softmax')",
    "Manhattan()", "Manhattan(reference='first')", "AFTSimple()",
]  # fmt: skip
ALL = [
    *(each for each in WALKED if "Taylor" not in each),
    "FavorPlus(num_features=16)", "FavorPlusPlus(num_features=16)", "LinearAttention()",
    "DecayedLinearAttention()",
]  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 30 to 40 tokens."""
    monkeypatch.setattr(advancing, "LEAST", 30)
    monkeypatch.setattr(advancing, "NUMBERS", 1)


def _run(mechanism: Any, w: Any, x: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Outputs and state of a call behind a state, a summary of the same, and gradients of sums of them all."""
    first = mechanism.decode(*(t[..., :5, :] for t in x), w)[1]
    rest = [t[..., 5:, :] for t in x]
    out, after = mechanism.decode(*rest, w, first, key_mask=mask)
    summary = mechanism.summarise(*rest[1:], w, key_mask=mask)
    results = [out, *tree_flatten(mechanism.combine(first, summary).content)[0], *tree_flatten(after.content)[0]]
    leaves = [*x, *(t for t in tree_flatten(w)[0] if isinstance(t, Tensor) and t.requires_grad)]
    total = sum(((i + 1) * t).sin().sum() for i, t in enumerate(results) if t.requires_grad)
    assert isinstance(total, Tensor)
    return [*results, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("expression", WALKED)
@pytest.mark.usefixtures("small")
def test_advancing_are_one_pass(expression: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = catalogue.parse(expression)
    w = _double(mechanism.weights(Shape(2, 8)))
    x = [t.requires_grad_() for t in qkv(205)]
    mask = some_keys(2, 200) if masked else None
    with trace.recorded() as steps:
        walked = _run(mechanism, w, x, mask)
    assert any(step.path.startswith("chunk by chunk") for step in steps)
    monkeypatch.setattr(advancing, "NUMBERS", 2**40)
    for i, (a, b) in enumerate(zip(walked, _run(mechanism, w, x, mask), strict=True)):
        near = 1e-11 * max(1.0, float(b.detach().abs().max()))
        torch.testing.assert_close(a, b, rtol=1e-10, atol=near, msg=lambda text, i=i: f"result {i}: {text}")


def _double(w: Any) -> Any:
    """Weights in float64, parameters with gradients."""
    return torch.utils._pytree.tree_map(
        lambda t: t.detach().double().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, w
    )


@pytest.mark.slow
@pytest.mark.parametrize("expression", ALL)
def test_training_behind_a_state_takes_the_memory_of_a_causal_call(expression: str) -> None:
    mechanism = catalogue.parse(expression)
    w = mechanism.weights(Shape(2, 32))
    x = [torch.randn(1, 2, 32_768, 32, requires_grad=True) for _ in range(3)]
    earlier = [torch.randn(1, 2, 9, 32, requires_grad=True) for _ in range(3)]
    way = torch.randn_like(x[2])

    def call() -> None:
        mechanism(*x, w, is_causal=True).backward(way)

    def behind() -> None:
        mechanism.decode(*x, w, mechanism.decode(*earlier, w)[1])[0].backward(way)

    def read() -> None:
        state = mechanism.combine(mechanism.decode(*earlier, w)[1], mechanism.summarise(*x[1:], w))
        mechanism.decode(*x, w, state)[0].backward(way)

    peaks = []
    for run in (call, behind, read):
        for t in x:
            t.grad = None
        peaks.append(peak_bytes(run) / way.nbytes)
    assert peaks[1] <= 1.25 * peaks[0], peaks
    assert peaks[2] <= 1.25 * peaks[0] + 2.5, peaks  # keys and values have gradients from the sums and from the pass
