"""``swap(..., exact_up_to=)``: the model's own attention to the bit for short inputs, the mechanism beyond."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fast_attention
from fast_attention import ByLength, FavorPlus, LinearAttention, Local, Shape, Softmax, cache_argument, swap, swap_back
from fast_attention.engine import heads, trace
from fast_attention.integrations import crossover
from fast_attention.nn.bound import Bound

transformers = pytest.importorskip("transformers")
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function  # noqa: E402

from fast_attention.integrations import visible  # noqa: E402
from fast_attention.integrations.attention import Swapped, layers_of  # noqa: E402

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
         "max_position_embeddings": 700}  # fmt: skip


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "Bert":
        return transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    grouped = {"num_key_value_heads": 2, "head_dim": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **grouped)).eval()


def step(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **{cache_argument.name_of(model.forward): cache}).logits


def outputs(model: Any, ids: Tensor, mask: Tensor | None, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **given)[0]


@pytest.mark.parametrize("kind", ["Bert", "Llama"])
@pytest.mark.parametrize("length", [40, 600])
@pytest.mark.parametrize("padded", ["not", "at the end", "at the beginning"])
def test_short_inputs_give_what_the_model_gave_to_the_bit(kind: str, length: int, padded: str) -> None:
    """600 tokens too, where this library's exact attention has a faster form for masks."""
    model, ids = model_of(kind), torch.randint(5, 99, (3, length))
    mask = torch.ones_like(ids)
    if padded != "not":
        mask[1, slice(-7, None) if padded == "at the end" else slice(7)] = 0
        mask[2, slice(length // 2, None) if padded == "at the end" else slice(length // 2)] = 0
    given = None if padded == "not" else mask
    assert model.config._attn_implementation == "sdpa"
    before = outputs(model, ids, given)[mask.bool()]
    report = swap(model, "FavorPlus(num_features=8)", exact_up_to=length)
    assert {layer.mechanism for layer in report.replaced} == {
        repr(ByLength(Softmax(), FavorPlus(num_features=8), length))
    }
    assert torch.equal(outputs(model, ids, given)[mask.bool()], before)
    assert torch.equal(outputs(model, ids, given, use_cache=False)[mask.bool()], before)
    swap(model, "FavorPlus(num_features=8)", exact_up_to=length // 3)
    assert not torch.equal(outputs(model, ids, given)[mask.bool()], before)


@pytest.mark.parametrize("mask", [None, torch.tensor([[1] * 20, [1] * 13 + [0] * 7])])
def test_short_inputs_ask_the_mechanism_nothing(mask: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost what the original model takes: no weights are put together, and nothing is checked for each layer."""
    model, ids, asked = model_of("Bert"), torch.randint(5, 99, (2, 20)), []
    swap(model, "FavorPlus(num_features=8)", exact_up_to=20)
    forward = Bound.forward
    monkeypatch.setattr(Bound, "forward", lambda *args, **settings: asked.append(1) or forward(*args, **settings))
    short = outputs(model, ids, mask)
    assert not asked
    monkeypatch.setattr(Swapped, "exact", lambda *args: None)
    assert torch.equal(outputs(model, ids, mask), short)
    assert len(asked) == 2, "one for each layer"


def test_hooks_on_the_mechanism_are_called_for_short_inputs() -> None:
    model, ids, called = model_of("Bert"), torch.randint(5, 99, (2, 20)), []
    swap(model, "FavorPlus(num_features=8)", exact_up_to=20)
    for layer in layers_of(model).values():
        layer.bound.register_forward_hook(lambda *_: called.append(1))
    outputs(model, ids, None)
    assert len(called) == 2


def test_explain_says_that_short_inputs_are_exact() -> None:
    model, ids = model_of("Bert"), torch.randint(5, 99, (2, 20))
    swap(model, "FavorPlus(num_features=8)", exact_up_to=20)
    with trace.recorded() as steps:
        outputs(model, ids, None)
    assert [step.path for step in steps] == ["Softmax()", "torch's fused kernel"] * 2
    assert steps[0].sizes == {"above": 20}


def test_masks_of_a_known_length_are_read_once() -> None:
    """What they show is that of the batch in hand: another batch, and padding, change nothing of the structure."""
    tokens = torch.ones(3, 9, dtype=torch.bool)
    for sees in (causal_mask_function, bidirectional_mask_function):
        for length in (1, 2, 9):
            alone = visible.Positions(1, 0, length, 0, length, torch.device("cpu"))
            first = visible.read(sees, alone, None, torch.zeros)
            again = visible.read(sees, replace(alone, batch=3), tokens[:, :length], torch.zeros)
            assert first.tokens is None
            assert again.tokens is not None
            assert again.complete
            assert again.is_causal == first.is_causal == (sees is causal_mask_function or length == 1)
            assert (again.keys_left, again.keys_right, again.sequences) == (None, None, None)


def test_padded_sequences_beyond_are_what_they_are_alone() -> None:
    model, ids = model_of("Bert"), torch.randint(5, 99, (3, 60))
    mask = torch.arange(60) < torch.tensor([[60], [20], [21]])
    swap(model, "LinearAttention", exact_up_to=20)
    together = outputs(model, ids, mask.long())
    for i, length in enumerate((60, 20, 21)):
        torch.testing.assert_close(together[i, :length], outputs(model, ids[i : i + 1, :length], None)[0])
    swap_back(model)
    torch.testing.assert_close(together[1, :20], outputs(model, ids[1:2, :20], None)[0])


def test_generation_is_the_models_up_to_there_and_one_pass_beyond() -> None:
    model, ids = model_of("Llama"), torch.randint(5, 99, (2, 10))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    settings: Any = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before = model.generate(ids, max_new_tokens=14, **settings)
    swap(model, "LinearAttention", exact_up_to=24)
    assert torch.equal(model.generate(ids, max_new_tokens=14, **settings), before)
    swap(model, "LinearAttention", exact_up_to=15)  # the sequences cross at different steps
    stepwise = model.generate(ids, max_new_tokens=14, **settings)
    assert torch.equal(model.generate(ids, max_new_tokens=14, use_cache=False, **settings), stepwise)


def test_short_steps_ask_the_mechanism_nothing_and_leave_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and states, after a reordering of beams too, are those of the mechanism's own decoding."""
    model, ids, asked = model_of("Llama"), torch.randint(5, 99, (2, 24)), []
    swap(model, "LinearAttention", exact_up_to=16)
    decode = Bound.decode
    monkeypatch.setattr(Bound, "decode", lambda *args, **settings: asked.append(1) or decode(*args, **settings))

    def steps() -> tuple[list[Tensor], list[Any]]:
        cache, logits, states, asked[:] = transformers.DynamicCache(config=model.config), [], [], []
        for part in ids.split([10, 1, 3, 2, 1, 7], -1):
            logits.append(step(model, part, cache))
            states.append([layer.state for layer in cache.layers])
            if len(logits) == 2:
                cache.reorder_cache(torch.tensor([1, 1]))
        return logits, states

    logits, states = steps()
    assert len(asked) == 2 * 3, "in both layers at the beginning and beyond 16 tokens"
    monkeypatch.setattr(Swapped, "exact", lambda *args: None)
    expected_logits, expected_states = steps()
    assert len(asked) == 2 * 6
    assert all(torch.equal(*pair) for pair in zip(logits, expected_logits, strict=True))
    for part, expected in zip(tree_leaves(states), tree_leaves(expected_states), strict=True):
        assert torch.equal(part, expected) if isinstance(part, Tensor) else part == expected


@pytest.mark.parametrize("sizes", [[10, *[1] * 12], [10, 5, 1, 7]])
def test_short_steps_keep_the_models_heads_and_numbers(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds as many heads of keys as the model has, and logits are the original's to the bit."""
    model, ids = model_of("Llama"), torch.randint(5, 99, (2, sum(sizes)))
    groups = model.config.num_key_value_heads
    assert groups < model.config.num_attention_heads

    def logits() -> tuple[list[Tensor], Any]:
        cache = transformers.DynamicCache(config=model.config)
        return [step(model, part, cache) for part in ids.split(sizes, -1)], cache

    before, _ = logits()
    swap(model, "LinearAttention", exact_up_to=64)
    monkeypatch.setattr(heads, "repeat", lambda x, times: pytest.fail("repeated"))
    after, cache = logits()
    assert all(torch.equal(*pair) for pair in zip(after, before, strict=True))
    assert {layer.state.content.short.k.shape[1] for layer in cache.layers} == {groups}


def test_a_masked_token_in_a_short_step_is_not_seen_later() -> None:
    model, ids = model_of("Llama"), torch.randint(5, 99, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 9] = 0
    before = step(model, ids, None, mask)[:, -1:]
    swap(model, "LinearAttention", exact_up_to=16)
    cache = transformers.DynamicCache(config=model.config)
    step(model, ids[:, :8], cache)
    step(model, ids[:, 8:11], cache, mask[:, :11])
    torch.testing.assert_close(step(model, ids[:, 11:], cache, mask), before)


def test_steps_that_may_be_taken_back_are_recorded() -> None:
    model, ids = model_of("Llama"), torch.randint(5, 99, (1, 12))
    swap(model, "LinearAttention", exact_up_to=16)
    cache = transformers.DynamicCache(config=model.config)
    step(model, ids[:, :8], cache)
    for layer in cache.layers:
        layer.activate_past_recording()
    step(model, ids[:, 8:9], cache)
    expected = step(model, ids[:, 9:10], cache)
    cache.crop(-1)
    assert torch.equal(step(model, ids[:, 9:10], cache), expected)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model, ids = model_of("Bert"), torch.randint(5, 99, (2, 30))
    swap(model, "FavorPlus(num_features=8)", exact_up_to=16)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(fast_attention.from_pretrained(tmp_path), ids, None), outputs(model, ids, None))
    assert "ByLength(long=FavorPlus(num_features=8), above=16)" in (tmp_path / "config.json").read_text()


def test_patterns_and_other_libraries() -> None:
    model = model_of("Bert")
    report = swap(model, {"*layer.0.*": "LinearAttention", "*layer.1.*": "Softmax"}, exact_up_to=9)
    assert [layer.mechanism for layer in report.layers] == ["ByLength(long=LinearAttention(), above=9)", "Softmax()"]
    encoder = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    x = torch.randn(2, 7, 16)
    before = encoder(x)
    swap(encoder, LinearAttention(), exact_up_to=7)
    torch.testing.assert_close(encoder(x), before)
    assert (encoder(torch.randn(2, 8, 16)).isfinite()).all()


def faked(monkeypatch: pytest.MonkeyPatch, exact: Any, ours: Any) -> list[int]:
    """Times as functions of the length instead of measured ones; the lengths that were asked for."""
    asked: list[int] = []

    def seconds(mechanism: Any, shape: Shape, like: Tensor, *, is_causal: bool) -> tuple[float, float]:
        asked.append(shape.max_len)
        return exact(shape.max_len), ours(shape.max_len)

    monkeypatch.setattr(crossover, "seconds", seconds)
    return asked


def test_the_crossover_is_where_times_say(monkeypatch: pytest.MonkeyPatch) -> None:
    like, shape = torch.zeros(1), Shape(2, 8)

    def found(ours: Any, is_causal: bool = False, exact: Any = lambda n: 1e-9 * n * n) -> tuple[int, list[int]]:
        asked = faked(monkeypatch, exact, ours)
        return crossover.crossover(LinearAttention(), shape, like, is_causal=is_causal), asked

    assert found(lambda n: 1e-6 * n)[0] == 1024
    assert found(lambda n: 0.8e-6 * n) == (832, [64, 128, 256, 512, 1024, 704, 832])
    assert found(lambda n: 1.04e-9 * n * n)[0] == 32768, "never faster: where exact attention takes a second"
    assert found(lambda n: 1.04e-9 * n * n, is_causal=True)[0] == 64
    assert found(lambda n: 0.0) == (64, [64])
    assert found(lambda n: 1.0 * n, exact=lambda n: 1e-3 * n)[0] == 1024, "no pass longer than a second is tried"


def test_auto_measures_every_kind_of_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = faked(monkeypatch, lambda n: 1e-9 * n * n, lambda n: 256e-9 * n)
    model = model_of("Bert")
    torch.manual_seed(3)
    report = swap(model, "FavorPlus(num_features=8)", exact_up_to="auto")
    assert {layer.mechanism for layer in report.layers} == {"ByLength(long=FavorPlus(num_features=8), above=256)"}
    assert len(asked) == len({*asked})
    drawn = model.state_dict()["encoder.layer.0.attention.self.fast_attention.bound.long_projection"].clone()
    torch.manual_seed(3)
    swap(model, "FavorPlus(num_features=8)", exact_up_to=256)
    again = model.state_dict()["encoder.layer.0.attention.self.fast_attention.bound.long_projection"]
    assert torch.equal(drawn, again), "measuring draws nothing that a swap by number would not draw"
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
    assert len(swap(encoder, "Local(window=2)", exact_up_to="auto").replaced) == 2
    assert "above=256" in repr(encoder)


def test_what_is_measured_is_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "LONGEST", 512)
    monkeypatch.setattr(crossover, "ROUNDS", 2)
    for is_causal in (False, True):
        tokens = crossover.crossover(Local(window=8), Shape(2, 8), torch.zeros(1), is_causal=is_causal)
        assert 64 <= tokens <= 512
        assert tokens % 64 == 0


@pytest.mark.parametrize("wrong", [0, -3, True, 2.5, "often", "12"])
def test_what_is_no_number_of_tokens_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="give a number of tokens, at least 1, or 'auto' to measure it"):
        swap(model_of("Bert"), "LinearAttention", exact_up_to=wrong)


def test_a_limit_of_its_own_and_mixers_are_refused() -> None:
    model = model_of("Bert")
    with pytest.raises(ValueError, match=r"ByLength\(\) says itself up to where it is exact; leave one of them out"):
        swap(model, ByLength(), exact_up_to=8)
    for limit in (8, "auto"):
        with pytest.raises(NotImplementedError, match=r"FNet\(\) mixes whole tokens and takes no queries"):
            swap(model, "FNet", exact_up_to=limit)  # type: ignore[arg-type]
    assert model.config._attn_implementation == "sdpa"
