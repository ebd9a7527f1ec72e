"""States that roll back: assisted decoding of swapped models writes what greedy decoding does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from fast_attention import Shape, decoding, swap
from fast_attention.integrations import cache as caches
from fast_attention.integrations import calls
from fast_attention.integrations.cache import StateLayer
from fast_attention.mechanism import Unsupported
from fast_attention.nn.bound import Bound

transformers = pytest.importorskip("transformers")
ANNOUNCED = Version(transformers.__version__) >= Version("5.16")  # that tokens will be taken back

SIZES: dict[str, dict[str, Any]] = {
    "Llama": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 29,
        "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None,
        "initializer_range": 0.4,
    },
    "GPT2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 29, "n_positions": 512, "initializer_range": 0.4,
        "bos_token_id": None, "eos_token_id": None,
    },
    "Bart": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 29,
        "pad_token_id": 1, "forced_eos_token_id": None, "eos_token_id": None, "init_std": 0.4,
    },
}  # fmt: skip
KINDS = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Bart": "BartForConditionalGeneration"}
HYBRID = "Hybrid(near=BlockLocal(block_size=4), far=LearnedFeatures(num_features=8))"
MECHANISMS = ["LinearAttention()", "Local(window=(5, 0))", HYBRID, "Softmax()"]


def build(name: str, seed: int = 3, **sizes: Any) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**SIZES[name], **sizes})
    return getattr(transformers, KINDS[name])(config).eval()


def nearly(name: str) -> Any:
    """A model that often guesses what ``build(name)`` writes, and often not."""
    assistant, noise = build(name), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight += 0.15 * torch.randn(weight.shape, generator=noise)
    return assistant


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that are taken back."""
    numbers: list[int] = []
    crop = StateLayer.crop

    def recorded(layer: StateLayer, tokens_to_remove: int) -> None:
        numbers.append(-tokens_to_remove)
        crop(layer, tokens_to_remove)

    monkeypatch.setattr(StateLayer, "crop", recorded)
    return numbers


def prompt(length: int = 9) -> Tensor:
    return torch.randint(5, 29, (1, length), generator=torch.Generator().manual_seed(1)).repeat(1, 3)


@pytest.mark.skipif(not ANNOUNCED, reason="transformers announces no taking back")
@pytest.mark.parametrize(("name", "mechanism"), [*(("Llama", m) for m in MECHANISMS), ("GPT2", "LinearAttention()")])
@pytest.mark.parametrize("assisted", ["prompt lookup", "assistant", "swapped assistant"])
def test_assisted_decoding_writes_what_greedy_decoding_does(
    name: str, mechanism: str, assisted: str, removed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With some candidates taken and some refused, left padding, and prompts longer than what can be taken back."""
    monkeypatch.setattr(caches, "LONGEST", 24)
    model = build(name)
    swap(model, mechanism)
    given = {"input_ids": prompt(), "attention_mask": (torch.arange(27) > 3).long()[None]}
    wanted = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    greedy = model.generate(**given, **wanted)
    assert not removed
    how: dict[str, Any] = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}
    if assisted != "prompt lookup":
        how = {"assistant_model": nearly(name)}
        if assisted == "swapped assistant":
            swap(how["assistant_model"], mechanism)
    assert torch.equal(model.generate(**given, **wanted, **how), greedy)
    assert mechanism == "Softmax()" or min(removed) < max(removed)


@pytest.mark.skipif(not ANNOUNCED, reason="transformers announces no taking back")
def test_a_decoder_with_an_encoder_and_an_exact_model_with_a_swapped_assistant(removed: list[int]) -> None:
    model, wanted = build("Bart"), {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    swap(model, {"*decoder*self_attn": "LinearAttention()"})
    greedy = model.generate(prompt(), **wanted)
    assert torch.equal(model.generate(prompt(), **wanted, assistant_model=nearly("Bart")), greedy)
    exact, assistant = build("Llama"), nearly("Llama")
    swap(assistant, "LinearAttention()")
    taken_back = len(removed)
    greedy = exact.generate(prompt(), **wanted)
    assert torch.equal(exact.generate(prompt(), **wanted, assistant_model=assistant), greedy)
    assert taken_back < len(removed)


@pytest.mark.skipif(ANNOUNCED, reason="transformers announces that it will take tokens back")
def test_an_older_transformers_is_named() -> None:
    model = build("Llama")
    swap(model, "LinearAttention()")
    with pytest.raises(Unsupported, match=r"Assisted decoding does so from transformers 5\.16 on"):
        model.generate(prompt(), max_new_tokens=8, assistant_model=nearly("Llama"))


Tokens = tuple[Tensor, Tensor, Tensor, Tensor]


def layer_and_tokens(mechanism: str, tokens: int, *, record_past: bool = True) -> tuple[StateLayer, Tokens]:
    """A layer without a state, and the tokens of two sequences, the first padded on the left."""
    torch.manual_seed(2)
    bound = Bound(mechanism, Shape(heads=2, head_dim=8, max_len=tokens))
    q, k, v = (torch.randn(2, 2, tokens, 8) for _ in range(3))
    return StateLayer(bound, record_past=record_past), (q, k, v, torch.arange(tokens) >= torch.tensor([[3], [0]]))


def feed(layer: StateLayer, tokens: Tokens, start: int, end: int, rows: Any = slice(None)) -> Tensor:
    q, k, v = (x[rows, :, start:end] for x in tokens[:3])
    module = nn.Identity()
    calls.begin(module, cache=layer)
    layer.update(k, v)
    calls.end(module)
    return layer.advance(q, k, v, tokens[3][rows, start:end])


@pytest.mark.parametrize("mechanism", [*MECHANISMS[:3], "LSH(bucket_size=4)", "AFTSimple()"])
def test_tokens_that_were_taken_back_leave_nothing(mechanism: str) -> None:
    """At the borders of calls and inside them; what follows is what a sequence without them gives."""
    _, tokens = layer_and_tokens(mechanism, 24)
    q, k, v, visible = tokens
    other = (q.flip(-2), k.flip(-2), v.flip(-2), visible)
    for removed in (0, 1, 2, 4, 5, 6, 7, 12, 13, 17):
        layer, _ = layer_and_tokens(mechanism, 24)
        for start, end in ((0, 11), (11, 12), (12, 13), (13, 17)):
            feed(layer, other if start >= 17 - removed else tokens, start, end)
        layer.crop(-removed)
        assert layer.get_seq_length() == 17 - removed
        after = feed(layer, tokens, 17 - removed, 24)
        whole, _ = layer_and_tokens(mechanism, 24, record_past=False)
        feed(whole, tokens, 0, 17 - removed) if removed < 17 else None
        torch.testing.assert_close(after, feed(whole, tokens, 17 - removed, 24), atol=2e-6, rtol=1e-4)


def test_sequences_are_selected_with_what_can_be_taken_back() -> None:
    for selected_first in (True, False):
        layer, tokens = layer_and_tokens("LinearAttention()", 16)
        feed(layer, tokens, 0, 8)
        feed(layer, tokens, 8, 13)
        rows = torch.tensor([1, 1, 0])
        if selected_first:
            layer.reorder_cache(rows)
            layer.crop(-3)
        else:
            layer.crop(-3)
            layer.batch_select_indices(rows)
        whole, _ = layer_and_tokens("LinearAttention()", 16)
        feed(whole, tokens, 0, 10)
        wanted = feed(whole, tokens, 10, 16)[rows]
        torch.testing.assert_close(feed(layer, tokens, 10, 16, rows), wanted, atol=2e-6, rtol=1e-4)


def test_memory_of_what_can_be_taken_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "LONGEST", 8)
    layer, tokens = layer_and_tokens("LinearAttention()", 90)
    front = feed(layer, tokens, 0, 30)
    plain, _ = layer_and_tokens("LinearAttention()", 90, record_past=False)
    torch.testing.assert_close(front, feed(plain, tokens, 0, 30), atol=2e-6, rtol=1e-4)
    assert not plain.record
    end = 30
    for new in [1] * 23 + [3] * 6 + [8, 1, 8]:
        feed(layer, tokens, end, end + new)
        end += new
        assert 8 <= sum(past.tokens for past in layer.record) < 16
        assert len(layer.record) <= 2
        held = [x for past in layer.record for x in decoding.leaves(past.calls)]
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in held)


def test_what_cannot_be_taken_back_is_refused() -> None:
    layer, tokens = layer_and_tokens("LinearAttention()", 300)
    feed(layer, tokens, 0, 270)
    with pytest.raises(ValueError, match="as a negative number"):
        layer.crop(5)
    with pytest.raises(Unsupported, match="the last 256 tokens can be taken back, not 257: 256 at least"):
        layer.crop(-257)
    layer.crop(-256)
    with pytest.raises(Unsupported, match="the last 0 tokens can be taken back, not 1"):
        layer.crop(-1)
    feed(layer, tokens, 14, 20)
    layer.crop(-6)
    feed(layer, tokens, 14, 20)
    layer.reset()
    with pytest.raises(Unsupported, match="the last 0 tokens"):
        layer.crop(-1)
    plain, _ = layer_and_tokens("LinearAttention()", 300, record_past=False)
    feed(plain, tokens, 0, 4)
    plain.crop(0)  # as transformers asks on Apple's GPUs
    with pytest.raises(Unsupported, match=r"only if told beforehand, by cache.activate_past_recording\(\)"):
        plain.crop(-1)
    plain.activate_past_recording()
    feed(plain, tokens, 4, 6)
    plain.crop(-2)
    assert plain.get_seq_length() == 4
