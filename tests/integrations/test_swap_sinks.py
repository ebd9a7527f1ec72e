"""Swapped models with learned sinks (gpt-oss): the model's own parameter is used, by whatever forms scores."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fast_attention
from fast_attention import Shape, swap, swap_back
from fast_attention.mechanism import Unsupported
from fast_attention.nn.bound import Bound

transformers = pytest.importorskip("transformers")


def build(window: int = 6) -> Any:
    """A layer with a window and one without, both with sinks of some weight."""
    torch.manual_seed(3)
    config = transformers.GptOssConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, vocab_size=29, num_local_experts=2, num_experts_per_tok=1, sliding_window=window,
        initializer_range=0.4, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config).eval()


def tokens(length: int = 17) -> dict[str, Tensor]:
    ids = torch.randint(5, 29, (2, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": (torch.arange(length) >= torch.tensor([[3], [0]])).long()}


def logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**given).logits[given["attention_mask"].bool()]


@pytest.mark.parametrize("mechanism", ["Softmax()", {"*0.self_attn": "Local(window=5)", "*1.self_attn": "Softmax()"}])
def test_the_model_s_own_sinks_are_used(mechanism: Any) -> None:
    """Outputs, gradients of the sinks, generation with and without a state, and changed sinks."""
    model, given = build(), tokens()
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    wanted = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    before, written = logits(model, given), model.generate(**given, **wanted)
    slopes = torch.autograd.grad(before.square().sum(), sinks)
    names = set(model.state_dict())
    swap(model, mechanism)
    assert set(model.state_dict()) == names
    after = logits(model, given)
    torch.testing.assert_close(after, before, atol=2e-5, rtol=1e-4)
    for a, b in zip(torch.autograd.grad(after.square().sum(), sinks), slopes, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3 * float(b.abs().max()), rtol=1e-3)
    assert torch.equal(model.generate(**given, **wanted), written)
    with torch.no_grad():
        sinks[0] += 5
    changed = logits(model, given)
    assert not torch.allclose(changed, after, atol=1e-2)
    swap_back(model)
    torch.testing.assert_close(logits(model, given), changed, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "mechanism",
    [
        "BigBird(block_size=64)",
        "Selected(block_size=64)",
        "Hybrid(near=BlockLocal(block_size=64), first=0)",
        "Hybrid(near=BlockLocal(bias=ALiBi()))",
    ],
)
def test_other_mechanisms_take_the_model_s_sinks(mechanism: str) -> None:
    """Where all keys are read they are the model; they are moved by changed sinks, and decode as in one pass."""
    model, given = build(), tokens()
    before = logits(model, given)
    swap(model, {"*1.self_attn": mechanism})
    after = logits(model, given)
    if "bias" not in mechanism:
        torch.testing.assert_close(after, before, atol=2e-5, rtol=1e-4)
    layer = model.model.layers[1].self_attn
    (slope,) = torch.autograd.grad(after.square().sum(), [layer.sinks])
    assert bool(slope.abs().min() > 0)
    with torch.no_grad():
        layer.sinks[0] += 5
    changed = logits(model, given)
    assert not torch.allclose(changed, after, atol=1e-2)
    if "BigBird" not in mechanism:  # it has no state
        wanted = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        assert torch.equal(*(model.generate(**given, **wanted, use_cache=cache) for cache in (False, True)))


def test_sinks_of_a_saved_and_of_a_copied_model(tmp_path: Path) -> None:
    model, given = build(), tokens()
    swap(model, {"*0.self_attn": "Local(window=4)"})
    before = logits(model, given)
    assert torch.equal(logits(copy.deepcopy(model), given), before)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(fast_attention.from_pretrained(tmp_path), given), before)


def test_sinks_of_packed_texts() -> None:
    model = build()
    swap(model, {"*0.self_attn": "Local(window=5)", "*1.self_attn": "Softmax()"})
    a, b = tokens(7)["input_ids"][1:], tokens(10)["input_ids"][1:]
    places = torch.cat([torch.arange(7), torch.arange(10)])[None]
    packed = model(torch.cat([a, b], 1), position_ids=places, use_cache=False).logits
    apart = torch.cat([model(x, use_cache=False).logits for x in (a, b)], 1)
    torch.testing.assert_close(packed, apart, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mechanism", ["LinearAttention()", "ReLUAttention()", "Softmax(sinks=True)"])
def test_mechanisms_without_sinks_are_refused_by_name(mechanism: str) -> None:
    with pytest.raises(Unsupported, match=r"has sinks \(s_aux\), which .* does not take: Softmax\(\), Local\(\)"):
        swap(build(window=64), mechanism)
    bound, x = Bound(mechanism, Shape(heads=2, head_dim=4)), torch.randn(1, 2, 3, 4)
    with pytest.raises(Unsupported, match="takes no sinks of another module"):
        bound(x, x, x, sinks=torch.zeros(2))
