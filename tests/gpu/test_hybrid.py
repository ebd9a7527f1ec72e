"""Hybrid's near part by FlexAttention, merged with far keys and sink tokens: against the plain form, gradients too.

FlexAttention has gradients on a GPU only; on a CPU plain softmax with its logarithms stands for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fast_attention import BlockLocal, FavorPlus, Hybrid, LearnedFeatures, LinearAttention
from fast_attention.engine import trace
from fast_attention.functional import implementation
from fast_attention.gpu import flex, self_check
from fast_attention.traits import Shape
from tests.gpu.heads import assert_near, flex_by_pairs, softmax_of_pairs

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
MECHANISMS = [
    Hybrid(near=BlockLocal(block_size=20), far=FavorPlus(num_features=8)),
    Hybrid(near=BlockLocal(block_size=20, scale=0.2), far=LinearAttention(), first=2, last=0),
    Hybrid(near=BlockLocal(block_size=32), far=LearnedFeatures(num_features=8)),
    Hybrid(near=BlockLocal(block_size=20, sinks=True), far=FavorPlus(num_features=8), first=0),
]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    flex_by_pairs(monkeypatch, device)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_plain_form(mechanism: Any, is_causal: bool, masked: bool) -> None:
    length = 300 if torch.empty(0).device.type == "cpu" else 1100
    heads = [torch.randn(2, 2, n, 16).half().requires_grad_() for n in (length - 37, length, length)]
    mask = torch.rand(2, 1, length) > 0.2
    mask[0, 0, :60] = False
    w = mechanism.weights(Shape(heads=2, head_dim=16))
    for x in (y for y in torch.utils._pytree.tree_leaves(w) if isinstance(y, torch.nn.Parameter)):
        x.data = x.data.half()
    named, results = {"is_causal": is_causal, "key_mask": mask if masked else None}, []
    trained = [x for x in torch.utils._pytree.tree_leaves(w) if isinstance(x, torch.nn.Parameter)]
    grad = torch.randn(2, 2, length - 37, 16).half()
    with trace.recorded() as steps:
        results.append(mechanism.attend(*heads, w, **named))
    assert any(step.path.startswith(f"{trace.KERNEL}: FlexAttention") for step in steps)
    with implementation("reference"):
        results.append(mechanism.attend(*heads, w, **named))
    assert_near(results[0], results[1].double(), 2e-3)
    gradients = [torch.autograd.grad(x, [*heads, *trained], grad) for x in results]
    for mine, right in zip(*gradients, strict=True):
        assert_near(mine, right.double(), 4e-3)


@pytest.mark.parametrize("masked", [True, False])
def test_the_self_check_takes_logarithms(masked: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_check.flex_logs().compare(16, 16, torch.float16, device, masked) == ""
    right = flex.attend_with_logs
    monkeypatch.setattr(flex, "attend_with_logs", lambda *x, **y: (right(*x, **y)[0], 1.1 * right(*x, **y)[1]))
    assert "logarithm" in self_check.flex_logs().compare(16, 16, torch.float16, device, masked)


def test_torch_gives_logarithms(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention itself, without its gradient."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (torch.randn(1, 2, 256, 16).half() for _ in range(3))
    at, results = torch.arange(200), []
    for run in (softmax_of_pairs, flex_attention if device.type == "cpu" else flex.compiled()):
        monkeypatch.setattr(flex, "compiled", lambda run=run: run)
        pattern = flex.intervals(at - 30, at + 3, 200)
        results.append(flex.attend_with_logs(*(x[..., :200, :] for x in (q, k, v)), pattern, None, scale=None))
    for mine, right in zip(*results, strict=True):
        assert_near(mine, right.double(), 2e-3)
