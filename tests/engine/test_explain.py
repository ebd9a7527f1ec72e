"""``explain`` tells what ran, and optional fusion changes nothing but the path."""

from __future__ import annotations

import pytest
import torch

from fast_attention import Bound, MultiheadAttention, Shape, TokenMixer, catalogue, explain, functional
from fast_attention.engine import trace
from tests.cases import qkv


@pytest.mark.parametrize("name", catalogue.names())
def test_every_mechanism_can_be_explained(name: str) -> None:
    mechanism = catalogue.default(name)
    inputs = (torch.randn(2, 40, 16),) if mechanism.traits.inputs == "x" else qkv(40, dtype=torch.float32)
    for is_causal in mechanism.traits.modes:
        told = explain(mechanism, *inputs, is_causal=is_causal)
        assert str(told).startswith(f"{mechanism!r} on (2, ")
        assert told.steps, "why: every choice says what ran"
        assert len(str(told).splitlines()) > 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("LogAttention(score='logdot', normalize='softmax')", "sums"),
        ("LogAttention(normalize='softmax')", "cancels the queries"),
        ("Linformer(rank=4, projection=MeanPool())", "how many tokens"),
        ("GMLP(attention_dim=4)", "small head"),
        ("AFTLocal()", "each position's biases"),
        ("AFTConv()", "the same at all positions"),
    ],
)
def test_settings_say_their_own_reason(text: str, said: str) -> None:
    mechanism = catalogue.parse(text)
    inputs = (torch.randn(2, 40, 16),) if mechanism.traits.inputs == "x" else qkv(40, dtype=torch.float32)
    assert said in str(explain(mechanism, *inputs))


def test_biases_that_no_block_can_share_are_not_called_too_far_apart() -> None:
    with trace.recorded() as steps:
        functional.aft_local(*qkv(40), torch.zeros(2, 40, 5, dtype=torch.float64))
        functional.aft_local(*qkv(40), torch.full((1, 40, 5), 99.0, dtype=torch.float64))
    assert ["of its own" in step.why for step in steps] == [True, False]
    assert ["too far apart" in step.why for step in steps] == [False, True]


def test_it_names_the_kernel_that_torch_chose() -> None:
    told = explain("Softmax", *qkv(33, dtype=torch.float32))
    assert told.kernels == {"torch's flash kernel for the CPU": 1}
    assert "flash kernel" in str(told)


def test_it_takes_bound_mechanisms_and_modules() -> None:
    inputs = qkv(20)
    assert explain(Bound("Softmax", Shape(2, 8)).double(), *inputs).mechanism == "Softmax()"
    x = torch.randn(2, 20, 16)
    assert explain(TokenMixer(16, 2, "Softmax"), x).mechanism == "TokenMixer"
    module = MultiheadAttention(16, 2, batch_first=True)
    assert explain(module, x, x, x, need_weights=False).kernels


def test_refusals_pass_through() -> None:
    with pytest.raises(NotImplementedError, match="is_causal"):
        explain("Linformer", *qkv(8), is_causal=True)


def test_steps_are_collected_only_where_someone_follows() -> None:
    trace.record("nobody listens", "")
    with trace.recorded() as outer:
        trace.record("first", "because", chunk=64)
        with trace.recorded() as inner:
            trace.record("second", "")
        trace.record("third", "")
    assert [step.path for step in outer] == ["first", "third"]
    assert [step.path for step in inner] == ["second"]
    assert outer[0].sizes == {"chunk": 64}


def test_what_cannot_be_called_is_not_explained() -> None:
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match=r"Softmax\(\) takes q, k, v; got 0 tensors"):
        explain("Softmax")
    with pytest.raises(TypeError, match=r"q must be a torch.Tensor; got list"):
        explain("Softmax", [1], x, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be \(..., tokens, width\); got shape \(8,\)"):
        explain("FNet", torch.randn(8))
    with pytest.raises(TypeError, match="subject is a mechanism, its name, a Bound or another module"):
        explain(type(catalogue.default("Softmax")), x, x, x)  # type: ignore[arg-type]


def test_a_module_is_explained_by_its_keywords_too() -> None:
    assert "(1, 5, 8) torch.float32" in str(explain(TokenMixer(8, 2), x=torch.randn(1, 5, 8)))
