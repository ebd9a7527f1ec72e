"""What a swapped model is given in a call: masks of another length, caches of other mechanisms, tensors of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import cache_argument, swap, swap_back
from fast_attention.integrations import calls
from fast_attention.mechanism import Unsupported

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
    "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
TOKENS = torch.randint(5, 99, (2, 20), generator=torch.Generator().manual_seed(1))


def build(name: str, kind: str, **settings: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **settings})
    return getattr(transformers, f"{name}{kind}")(config).eval()


def behind(model: Any, tokens: Tensor, cache: Any, **given: Any) -> Any:
    return model(tokens, **given, **{cache_argument.name_of(model.forward): cache})


def cache_of(model: Any, tokens: Tensor, **given: Any) -> Any:
    return model(tokens, use_cache=True, **given)[cache_argument.name_of(model.forward)]


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["Softmax", "LinearAttention"])
@pytest.mark.parametrize("length", [30, 12])
def test_a_mask_of_another_length_is_read_by_position(mechanism: str, length: int) -> None:
    """One for a whole loop of generation, and one that ends before the tokens do: none of the rest is a token."""
    model = build("Llama", "ForCausalLM")
    mask = (torch.arange(length) >= torch.tensor([[5], [0]])).long()
    exact_mask = torch.nn.functional.pad(mask, (0, 20 - length))
    exact = model(TOKENS, attention_mask=exact_mask).logits
    swap(model, mechanism)
    wanted = model(TOKENS, attention_mask=exact_mask).logits
    seen = exact_mask.bool()
    torch.testing.assert_close(model(TOKENS, attention_mask=mask).logits[seen], wanted[seen])
    if mechanism == "Softmax":
        torch.testing.assert_close(wanted[seen], exact[seen], atol=2e-5, rtol=1e-4)
    if length > 20:
        after = behind(model, TOKENS[:, 12:], cache_of(model, TOKENS[:, :12], attention_mask=mask), attention_mask=mask)
        torch.testing.assert_close(after.logits, wanted[:, 12:], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_tokens_that_see_later_ones_are_not_decoded() -> None:
    model = build("Llama", "ForCausalLM", is_causal=False)
    swap(model, "LinearAttention")
    cache, step = cache_of(model, TOKENS), TOKENS[:, :1]
    torch.testing.assert_close(model(TOKENS, use_cache=True).logits, model(TOKENS, use_cache=False).logits)
    with pytest.raises(Unsupported, match="no state of the tokens that see later ones"):
        behind(model, step, cache)


@torch.no_grad()
@pytest.mark.parametrize("then", ["", "Softmax", "Local(window=(3, 0))"])
def test_a_cache_of_another_mechanism_is_refused(then: str) -> None:
    model = build("Llama", "ForCausalLM")
    swap(model, "LinearAttention")
    cache = cache_of(model, TOKENS[:, :10])
    wanted = model(TOKENS).logits[:, 10:]
    after = behind(model, TOKENS[:, 10:], copy.deepcopy(cache)).logits
    torch.testing.assert_close(after, wanted, atol=2e-5, rtol=1e-4)
    swap(model, then) if then else swap_back(model)
    with pytest.raises(Unsupported, match=r"this cache keeps a state of LinearAttention\(\).*a new cache"):
        behind(model, TOKENS[:, 10:], cache)


def test_tensors_that_no_mechanism_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's own, such as the blocks that a query may see; what the model was given merely passes through."""
    model = build("Llama", "Model")
    kind: Any = type(model.layers[0].self_attn)
    forward = kind.forward

    def selecting(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs, block_indices=torch.zeros(1, dtype=torch.long))

    swap(model, "Softmax")
    labels = torch.zeros(2)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS, labels=labels)[0], model(TOKENS)[0])
    monkeypatch.setattr(kind, "forward", selecting)
    with pytest.raises(Unsupported, match="block_indices"):
        model(TOKENS)
    with pytest.raises(Unsupported, match="changes its scores by block_indices, which no mechanism does"):
        swap(model, "Softmax")


@pytest.mark.parametrize("window", [6, 64])
def test_layers_with_windows_take_a_cache_of_a_fixed_size(window: int) -> None:
    calls.begin(other := nn.Linear(1, 1))  # an interrupt left it open
    model = build("Mistral", "ForCausalLM", **GROUPED, sliding_window=window)
    wanted = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    exact = model.generate(TOKENS, **wanted)
    swap(model, "Softmax")
    assert torch.equal(model.generate(TOKENS, **wanted, cache_implementation="static"), exact)
    calls.end(other)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_is_swapped() -> None:
    """Its layers have no numbers of a dtype that a mechanism could take."""
    model = torch.ao.quantization.quantize_dynamic(build("Bert", "Model"), {nn.Linear})
    exact = model(TOKENS).last_hidden_state
    swap(model, "Softmax")
    torch.testing.assert_close(model(TOKENS).last_hidden_state, exact)


@torch.no_grad()
def test_positions_without_a_keyword_separate_texts() -> None:
    model = build("Bert", "Model")
    swap(model, "Softmax")
    positions = torch.arange(10).repeat(2)[None].expand(2, -1)
    alone = model(TOKENS[:, :10]).last_hidden_state
    torch.testing.assert_close(
        model(TOKENS, None, None, positions).last_hidden_state[:, :10], alone, atol=2e-5, rtol=1e-4
    )


def test_mllama_generates_from_a_state() -> None:
    if not hasattr(transformers, "MllamaForCausalLM"):
        pytest.skip("this release of transformers has no Mllama")
    config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        **SMALL, num_key_value_heads=2, cross_attention_layers=[1], pad_token_id=0, bos_token_id=0, eos_token_id=98
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.MllamaForCausalLM(config).eval()
    swap(model, {"*0.self_attn": "LinearAttention"})
    wanted = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(*(model.generate(TOKENS, **wanted, use_cache=cache) for cache in (False, True)))


def test_an_error_of_the_check_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose masks or shapes are other than the interface's, as DeepSeek-V4's, is named."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("attn_mask has another shape")

    model = build("Bert", "Model")
    monkeypatch.setattr("fast_attention.integrations.attention._run", failing)
    monkeypatch.setattr("fast_attention.integrations.attention.Swapped.exact", lambda *args: None)
    with pytest.raises(Unsupported, match=r"BertModel does not run .*encoder\.layer\.0.*ValueError: attn_mask"):
        swap(model, "Softmax")
    assert not swap_back(model)


def test_parts_get_their_implementations_back() -> None:
    text = {**SMALL, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}
    vision = {**SMALL, "image_size": 16, "patch_size": 4}
    del vision["vocab_size"], vision["max_position_embeddings"]
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    model = transformers.CLIPModel(config)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    swap(model, "Softmax")
    assert model.config.text_config._attn_implementation == "fast_attention"
    swap_back(model)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["LinearAttention", "Local(window=30)"])
def test_parts_are_given_the_mask_that_their_model_made(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dinov2's encoder is a model of its own, inside one that makes the mask: no mask of all pairs is formed."""
    settings = {**SMALL, "image_size": 16, "patch_size": 4}
    del settings["vocab_size"], settings["max_position_embeddings"]
    model = transformers.Dinov2Model(transformers.Dinov2Config(**settings)).eval()
    images = torch.randn(2, 3, 16, 16)
    exact = model(images).last_hidden_state
    swap(model, mechanism)
    monkeypatch.setattr("fast_attention.integrations.attention._run_masked", lambda *args: pytest.fail("a dense mask"))
    found = model(images).last_hidden_state
    assert (mechanism == "LinearAttention") != torch.allclose(found, exact, atol=1e-5, rtol=1e-4)


def test_steps_without_a_state_are_refused_as_such() -> None:
    model = build("Llama", "ForCausalLM")
    swap(model, "BigBird(block_size=4)")
    with pytest.raises(Unsupported, match=r"cannot decode 1 tokens behind 20 in a cache .* use_cache=False"):
        model.generate(TOKENS, max_new_tokens=3)
    assert model.generate(TOKENS, max_new_tokens=3, min_new_tokens=3, use_cache=False).shape == (2, 23)


@torch.no_grad()
@pytest.mark.parametrize("outer", ["{}", "Adapted(mechanism={})", "ByLength(short=Softmax(), long={}, above=4)"])
def test_near_keys_have_no_place_in_another_sequence(outer: str) -> None:
    """A Hybrid's near keys are those beside the query, as a window's are: a decoder's cross attention stays exact."""
    bart = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 99}
    sizes = {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
    model = transformers.BartModel(transformers.BartConfig(**bart, **sizes)).eval()
    report = swap(model, outer.format("Hybrid(near=BlockLocal(block_size=4))"))
    assert [layer.name for layer in report.unchanged] == ["decoder.layers.0.encoder_attn"]
    mask = torch.ones_like(TOKENS)
    mask[1, 13:] = 0
    batch = model(TOKENS, attention_mask=mask, decoder_input_ids=TOKENS[:, :9]).last_hidden_state
    alone = model(TOKENS[1:, :13], decoder_input_ids=TOKENS[1:, :9]).last_hidden_state
    torch.testing.assert_close(batch[1:], alone, atol=2e-5, rtol=1e-4)


def test_whisper_splits_the_cache_of_a_state_by_rows() -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    more = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "vocab_size": 99}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    places = {"max_source_positions": 20, "max_target_positions": 32}
    none = {"begin_suppress_tokens": None, "suppress_tokens": None}
    config = transformers.WhisperConfig(**sizes, **more, **ids, **places, **none)
    model, sound = transformers.WhisperForConditionalGeneration(config).eval(), torch.randn(2, 8, 40)
    swap(model, "LinearAttention", probe={"input_features": sound[:1], "decoder_input_ids": TOKENS[:1, :5]})
    wanted = {"max_new_tokens": 5, "do_sample": False}
    found = model.generate(input_features=sound, **wanted, return_dict_in_generate=True)
    plain = model.generate(input_features=sound, **wanted)
    assert torch.equal(found.sequences[:, -plain.shape[1] :], plain)
