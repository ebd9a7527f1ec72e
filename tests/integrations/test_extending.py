"""``extend``: pretrained models that read further, short inputs as they were, saved and loaded to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import extend, swap
from fast_attention.mechanism import Unsupported

transformers = pytest.importorskip("transformers")
from tests.integrations.test_swap import BART, DECODERS, ENCODERS, T5  # noqa: E402

LEARNED = ["Bert", "Roberta", "DistilBert", "Electra", "Albert", "GPT2", "OPT", "Bart", "GPTNeo"]
ROTARY = ["Llama", "Qwen3", "Mistral", "GPTNeoX", "ModernBert"]
NEO = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "max_position_embeddings": 128,
    "attention_types": [[["global", "local"], 1]], "window_size": 8,
}  # fmt: skip
MODELS = {
    **ENCODERS,
    **DECODERS,
    "Bart": ("BartModel", "BartConfig", BART),
    "GPTNeo": ("GPTNeoModel", "GPTNeoConfig", NEO),
    "Marian": ("MarianModel", "MarianConfig", {**BART, "decoder_start_token_id": 1}),
    "T5": ("T5Model", "T5Config", T5),
    "Bloom": ("BloomModel", "BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
}


def build(kind: str, config: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()


def out(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids)[0]


def tokens(length: int) -> Tensor:
    return torch.randint(4, 99, (2, length))


@pytest.mark.parametrize("name", LEARNED)
def test_learned_positions_are_copied(name: str, tmp_path: Path) -> None:
    model = build(*MODELS[name])
    short, long = tokens(120), tokens(400)
    before = out(model, short)
    extension = extend(model, 400)
    assert (extension.before, extension.positions, extension.method) == (128, 400, "copy")
    assert torch.equal(out(model, short), before), "short inputs changed"
    after = out(model, long)
    model.save_pretrained(tmp_path)
    assert torch.equal(out(type(model).from_pretrained(tmp_path).eval(), long), after)
    with pytest.raises((IndexError, RuntimeError, ValueError)):  # and no further
        out(model, tokens(403))


def test_positions_repeat_with_their_period() -> None:
    """What stands at position i has the vector of position i modulo 128, whatever rows stand in front."""
    for name in ("Bert", "Roberta", "OPT"):
        model = build(*MODELS[name])
        (where,) = extend(model, 300).changed
        table = model.get_submodule(where).weight[-300:]
        assert torch.equal(table[:128], table[128:256])
        assert torch.equal(table[:44], table[256:])


def test_learned_positions_are_interpolated() -> None:
    model = build(*MODELS["Roberta"])
    old = model.embeddings.position_embeddings.weight.detach().clone()
    extend(model, 255, method="interpolate")
    new = model.embeddings.position_embeddings.weight
    assert torch.equal(new[:2], old[:2])
    assert torch.equal(new[2::2], old[2:])
    assert torch.allclose(new[3], (old[2] + old[3]) / 2)


def test_sinusoidal_positions_go_on_by_their_formula(tmp_path: Path) -> None:
    model = build(*MODELS["Marian"])
    extension = extend(model, 300)
    assert extension.kind == "sinusoidal"
    reference = transformers.MarianModel(transformers.MarianConfig(**{**BART, "max_position_embeddings": 300}))
    table = model.get_submodule(extension.changed[0]).weight
    assert torch.allclose(table, reference.encoder.embed_positions.weight, atol=1e-5)
    model.save_pretrained(tmp_path)
    long = tokens(290)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.allclose(out(again.encoder, long), out(model.encoder, long), atol=1e-5)


@pytest.mark.parametrize("method", ["yarn", "ntk", "linear"])
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions_are_scaled(name: str, method: Any, tmp_path: Path) -> None:
    model = build(*MODELS[name])
    if (name, method) == ("GPTNeoX", "ntk"):
        with pytest.raises(ValueError, match="2 rotary channels are one"):
            extend(model, 512, method=method)
        return
    extension = extend(model, 512, method=method)
    assert (extension.kind, extension.before, model.config.max_position_embeddings) == ("rotary", 128, 512)
    long = tokens(500)
    after = out(model, long)
    model.save_pretrained(tmp_path)
    assert torch.equal(out(type(model).from_pretrained(tmp_path).eval(), long), after)


def test_the_frequencies_are_those_of_the_papers() -> None:
    """Slow pairs are interpolated by all three, fast pairs stay under YaRN and nearly stay under NTK."""
    rates = {}
    for method in ("yarn", "ntk", "linear"):
        model = build(*MODELS["Llama"])
        old = model.model.rotary_emb.inv_freq.clone()
        extend(model, 512, method=method)  # type: ignore[arg-type]
        rates[method] = model.model.rotary_emb.inv_freq / old
    assert torch.allclose(rates["linear"], torch.full_like(rates["linear"], 1 / 4))
    assert rates["yarn"][0] == 1.0
    assert math.isclose(rates["yarn"][-1], 1 / 4, rel_tol=1e-6)
    assert rates["ntk"][0] == 1.0
    assert math.isclose(rates["ntk"][-1], 1 / 4, rel_tol=1e-5)


def test_layers_with_a_window_keep_their_positions() -> None:
    model = build(*MODELS["ModernBert"])
    before = dict(model.config.rope_parameters["sliding_attention"])
    extend(model, 512)
    assert model.config.rope_parameters["sliding_attention"] == before
    assert model.config.rope_parameters["full_attention"]["rope_type"] == "yarn"


def test_a_config_without_a_width_of_heads_gets_it(tmp_path: Path) -> None:
    sizes = {**MODELS["Llama"][2], "num_local_experts": 2, "head_dim": None}
    model = build("MixtralModel", "MixtralConfig", sizes)
    extend(model, 512)
    assert model.rotary_emb.config is model.config
    long = tokens(500)
    after = out(model, long)
    model.save_pretrained(tmp_path)
    assert torch.equal(out(type(model).from_pretrained(tmp_path).eval(), long), after)


def test_what_transformers_does_not_take_changes_nothing(tmp_path: Path) -> None:
    model = build("Phi3Model", "Phi3Config", {**MODELS["Llama"][2], "pad_token_id": 0})
    config, state, parts = model.config.to_dict(), model.state_dict(), [*model.modules()]
    with pytest.raises(Unsupported, match=r"Phi3Model: transformers does not take method='yarn'.*longrope.*'ntk'"):
        extend(model, 512)
    assert model.config.to_dict() == config
    assert [*model.modules()] == parts
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    extend(model, 512, method="ntk")
    model.save_pretrained(tmp_path)
    long = tokens(500)
    assert torch.equal(out(type(model).from_pretrained(tmp_path).eval(), long), out(model, long))


def test_rotary_positions_of_images_stay() -> None:
    images = transformers.PixtralVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
    )
    text = transformers.MistralConfig(**{**MODELS["Llama"][2], "head_dim": 8})
    model = transformers.LlavaModel(transformers.LlavaConfig(text_config=text, vision_config=images)).eval()
    assert extend(model, 512).changed == ("language_model.rotary_emb",)
    assert out(model, tokens(500)).shape == (2, 500, 32)


def test_models_of_one_config_are_not_extended_together() -> None:
    config = transformers.BertConfig(**MODELS["Bert"][2])
    first, second = transformers.BertModel(config), transformers.BertModel(config)
    extend(first, 256)
    assert second.config.max_position_embeddings == 128


@pytest.mark.parametrize(
    ("name", "said"), [("T5", "relative positions"), ("Bloom", "ALiBi"), ("Esm", "formula of its own")]
)
def test_positions_that_reach_any_length_are_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        extend(build(*MODELS[name]), 4096)


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    model = build(*MODELS["Bert"])
    before = model.state_dict()
    with pytest.raises(ValueError, match=r"positions=128: the model reads 128 tokens already"):
        extend(model, 128)
    with pytest.raises(ValueError, match=r"positions=400.5: give a whole number"):
        extend(model, 400.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'yarn' is not for learned positions, which take copy or interpolate"):
        extend(model, 256, method="yarn")
    with pytest.raises(ValueError, match="'copy' is not for rotary"):
        extend(build(*MODELS["Llama"]), 256, method="copy")
    with pytest.raises(Unsupported, match="no Hugging Face model"):
        extend(nn.Linear(2, 2), 256)
    scaled = build(*MODELS["Llama"])
    extend(scaled, 256)
    with pytest.raises(Unsupported, match="scaled already"):
        extend(scaled, 512)
    assert model.config.max_position_embeddings == 128
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_swapped_models_are_extended_unless_their_weights_are_for_a_length(tmp_path: Path) -> None:
    model = build(*MODELS["Bert"])
    swap(model, "Local(window=16)")
    extend(model, 400)
    long = tokens(400)
    after = out(model, long)
    model.save_pretrained(tmp_path)
    assert torch.equal(out(transformers.AutoModel.from_pretrained(tmp_path).eval(), long), after)
    swap(model, "Linformer(rank=8)")
    with pytest.raises(Unsupported, match=r"weights are for 400 tokens.*swap_back"):
        extend(model, 800)


def test_the_tokenizer_learns_of_it(tmp_path: Path) -> None:
    class Reader:
        model_max_length = 128

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.auto_model, self.tokenizer, self.max_seq_length = build(*MODELS["Bert"]), Reader(), 128

    reader, wrapper = Reader(), Wrapper()
    extend(wrapper, 256, tokenizer=reader)
    assert (reader.model_max_length, wrapper.tokenizer.model_max_length, wrapper.max_seq_length) == (256, 256, 256)
