"""Which models a swap finds its way through, and what it leaves alone: other models' configs, random generators."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fast_attention
from fast_attention import cache_argument, swap, swap_back
from fast_attention.integrations.probing import calls_interface
from fast_attention.mechanism import Unsupported
from tests.integrations.test_swap import BART, GPT2, SMALL, T5, VIT, build, inputs, out

transformers = pytest.importorskip("transformers")

ONE = {**SMALL, "num_hidden_layers": 1, "max_position_embeddings": 64}
BART_ONE = {**BART, "encoder_layers": 1, "decoder_layers": 1}
GPT2_ONE, T5_ONE = {**GPT2, "n_layer": 1}, {**T5, "num_layers": 1}
VIT_ONE = {**VIT, "num_hidden_layers": 1}
TOKENS = torch.randint(5, 99, (2, 7), generator=torch.Generator().manual_seed(1))
ENDED = torch.cat([TOKENS, torch.full((2, 1), 2)], 1)
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
CLIPS = torch.randn(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
MEMORY = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(4))


def both(kind: str, **more: Any) -> Any:
    text, vision = {**ONE, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1, "projection_size": 32}, VIT_ONE
    return getattr(transformers, kind)(text_config=text, vision_config=vision, **more)


def picture_to_text() -> Any:
    gpt2 = transformers.GPT2Config(**GPT2_ONE, bos_token_id=1, eos_token_id=2)
    vit = transformers.ViTConfig(**VIT_ONE)
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, gpt2)


def video() -> Any:
    more = {f"decoder_{name}": 4 for name in ("num_attention_heads", "hidden_size", "intermediate_size")}
    return transformers.VideoMAEConfig(**VIT_ONE, num_frames=4, **{**more, "decoder_num_hidden_layers": 1})


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Tensor], int]] = {
    "BertForMultipleChoice": (lambda: transformers.BertConfig(**ONE), {"input_ids": TOKENS.view(1, 2, 7)}, 1),
    "BartForSequenceClassification": (lambda: transformers.BartConfig(**BART_ONE), {"input_ids": ENDED}, 3),
    "T5ForSequenceClassification": (
        lambda: transformers.T5Config(**T5_ONE, eos_token_id=2, pad_token_id=0), {"input_ids": ENDED}, 3
    ),
    "GPT2ForSequenceClassification": (lambda: transformers.GPT2Config(**GPT2_ONE), {"input_ids": TOKENS[:1]}, 1),
    "CLIPModel": (lambda: both("CLIPConfig", projection_dim=32), {"input_ids": ENDED, "pixel_values": PIXELS}, 2),
    "SiglipModel": (lambda: both("SiglipConfig"), {"input_ids": ENDED, "pixel_values": PIXELS}, 2),
    "VisionEncoderDecoderModel": (picture_to_text, {"pixel_values": PIXELS, "decoder_input_ids": TOKENS}, 3),
    "VideoMAEModel": (video, {"pixel_values": CLIPS}, 1),
}  # fmt: skip


def made(kind: str, config: Any) -> Any:
    torch.manual_seed(3)
    model = getattr(transformers, kind)(config).eval()
    if not model._can_set_attn_implementation():
        pytest.skip(f"transformers {transformers.__version__} calls {kind}'s attention directly")
    return model


def first(found: Any) -> Tensor:
    return next(x for name in ("logits", "logits_per_image", "last_hidden_state") if (x := found.get(name)) is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind: str) -> None:
    """All layers are found, and exact attention changes nothing; any other mechanism runs."""
    config, given, layers = KINDS[kind]
    model = made(kind, config())
    before = first(model(**given))
    report = swap(model, "Softmax")
    assert len([layer for layer in report.replaced if layer.kind != "MultiheadAttention"]) == layers, report
    assert not report.unchanged, report
    torch.testing.assert_close(first(model(**given)), before, atol=1e-5, rtol=1e-4)
    if kind != "T5ForSequenceClassification":  # whose scores have a bias
        swap(model, "LinearAttention")
        assert not torch.equal(first(model(**given)), before)


def crossing(kind: str) -> Any:
    if kind == "gpt2":
        config = transformers.GPT2Config(**GPT2, add_cross_attention=True, bos_token_id=1, eos_token_id=2)
        return made("GPT2LMHeadModel", config)
    if kind == "bert":
        return made("BertLMHeadModel", transformers.BertConfig(**ONE, is_decoder=True, add_cross_attention=True))
    return made("BartForCausalLM", transformers.BartConfig(**BART_ONE))


@pytest.mark.parametrize("kind", ["gpt2", "bert", "bart"])
def test_decoders_that_attend_to_another_sequence(kind: str) -> None:
    """Their layers of both sorts are swapped, and generate with a state what recomputation does."""
    model = crossing(kind)
    given: dict[str, Any] = {"input_ids": TOKENS, "encoder_hidden_states": MEMORY}
    before = model(**given).logits
    report = swap(model, "Softmax")
    assert not report.unchanged, report
    assert len(report.replaced) == (4 if kind == "gpt2" else 2), report
    torch.testing.assert_close(model(**given).logits, before, atol=1e-5, rtol=1e-4)
    if kind != "bart":  # where they are not called, a decoder is a language model
        assert model(TOKENS).logits.isfinite().all()
    swap(model, "LinearAttention")
    whole = model(**given, use_cache=False).logits
    cache, rows, name = None, [], cache_argument.name_of(model.forward)
    for i in range(TOKENS.shape[1]):
        found = model(
            input_ids=TOKENS[:, i : i + 1], encoder_hidden_states=MEMORY, **{str(name): cache}, use_cache=True
        )
        cache = found[name]
        rows.append(found.logits)
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=1e-4)
    kept = swap(model, "AFTSimple").unchanged if fast_attention.AFTSimple().traits.cross is False else ()
    assert all("attends to another sequence" in layer.why for layer in kept)


T5_LIKE = ("T5", "MT5", "UMT5", "LongT5", "SwitchTransformers", "Pop2Piano")
BART_LIKE = (
    "Bart", "MBart", "PLBart", "Marian", "Pegasus", "PegasusX", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall",
    "M2M100", "NllbMoe",
)  # fmt: skip


def decoder(family: str) -> Any:
    """The decoder of an encoder-decoder model, by itself, as it is taken out of one or made."""
    config = getattr(transformers, f"{family}Config")
    if family in T5_LIKE:
        whole = "ForConditionalGeneration" if family == "Pop2Piano" else "Model"
        return made(family + whole, config(**T5_ONE)).decoder
    kind = importlib.import_module(config.__module__.replace("configuration", "modeling"))
    torch.manual_seed(3)
    return getattr(kind, f"{family}Decoder")(config(**BART_ONE)).eval()


@torch.no_grad()
@pytest.mark.parametrize("family", [*T5_LIKE, *BART_LIKE])
def test_every_layer_of_a_decoder_was_run_by_the_probe(family: str) -> None:
    """Both calls that a decoder takes work after the swap; exact attention in it gives what its own does."""
    model, given = decoder(family), ({"input_ids": TOKENS}, {"input_ids": TOKENS, "encoder_hidden_states": MEMORY})
    before = [model(**each, use_cache=False)[0] for each in given]
    for mechanism in ("Softmax", "BlockLocal(block_size=4)"):
        report = swap(model, mechanism)
        named = {layer.name for layer in report.layers}
        assert {name for name, part in model.named_modules() if calls_interface(type(part))} <= named
        assert {name.rpartition(".")[2] for name in named} > {"SelfAttention" if family in T5_LIKE else "self_attn"}
        assert not any("the probe did not call it" in layer.why for layer in report.unchanged), report
        for each, exact in zip(given, before, strict=True):
            found = model(**each, use_cache=False)[0]
            assert found.isfinite().all()
            if mechanism == "Softmax":
                torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_that_calls_the_interface_is_left_out_of_the_report(kind: str) -> None:
    model = made(kind, KINDS[kind][0]())
    report = swap(model, "Softmax")
    assert {name for name, part in model.named_modules() if calls_interface(type(part))} <= {
        layer.name for layer in report.layers
    }


class Odd(nn.Module):
    """A layer whose heads nothing tells, and which no probe reaches."""

    def forward(self, q: Tensor) -> Any:
        return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[self.name](self, q, q, q, None)


def test_a_layer_that_no_probe_runs_is_refused_by_name() -> None:
    """Where nothing is known of it, so that its first call would be an error."""
    model = build("Bert")
    model.encoder.odd = Odd()
    with pytest.raises(Unsupported, match=r"the probe did not run encoder\.odd \(Odd\), which calls its attention"):
        swap(model, "LinearAttention")
    assert not swap_back(model)


def test_a_config_that_models_share_stays_the_others() -> None:
    config = transformers.BertConfig(**ONE)
    ours, other = transformers.BertModel(config).eval(), transformers.BertModel(config).eval()
    before, kind = other(TOKENS)[0], config._attn_implementation
    swap(ours, "LinearAttention")
    assert torch.equal(other(TOKENS)[0], before)
    assert (config._attn_implementation, other.config is config) == (kind, True)
    assert torch.equal(transformers.BertModel(config).eval()(TOKENS)[0].isfinite(), before.isfinite())
    own = {id(part.config) for part in ours.modules() if "config" in vars(part)}
    assert own == {id(ours.config)}, "all modules of a model go on sharing theirs"
    assert swap_back(ours)
    assert ours.config._attn_implementation == kind
    both_ = made("CLIPModel", both("CLIPConfig", projection_dim=32))
    theirs = both_.config
    swap(both_, "LinearAttention")
    assert both_.text_model.config is both_.config.text_config is not theirs.text_config
    assert "fast_attention" not in str(vars(theirs.text_config)) + str(vars(theirs.vision_config))


def test_a_probe_of_the_callers() -> None:
    """Where none is known the error says so, and where one misses layers the report does."""
    sizes = {name: size for name, size in BART_ONE.items() if name != "max_position_embeddings"}
    config = transformers.WhisperConfig(
        **sizes, max_source_positions=20, max_target_positions=32, num_mel_bins=8, decoder_start_token_id=2
    )
    model = made("WhisperForConditionalGeneration", config)
    with pytest.raises(Unsupported, match=r"reads input_features.*swap\(model, \.\.\., probe=\{'input_features'"):
        swap(model, "Softmax")
    given = {"input_features": torch.randn(1, 8, 40), "decoder_input_ids": TOKENS[:1]}
    before = model(**given).logits
    report = swap(model, "Softmax", probe=given)
    assert len(report.replaced) == 3
    torch.testing.assert_close(model(**given).logits, before, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="probe: WhisperForConditionalGeneration does not take input_features: "):
        swap(model, "Softmax", probe={"input_features": torch.randn(1, 3, 3)})
    assert not swap_back(model)


def test_layers_that_the_probe_does_not_reach_are_named_and_stay_exact() -> None:
    model = crossing("bert")
    given: dict[str, Any] = {"input_ids": TOKENS, "encoder_hidden_states": MEMORY}
    before = model(**given).logits
    report = swap(model, "Softmax", probe={"input_ids": TOKENS})
    assert [layer.why.split(":")[0] for layer in report.unchanged] == ["the probe did not call it"]
    assert "crossattention" in report.unchanged[0].name
    torch.testing.assert_close(model(**given).logits, before, atol=1e-5, rtol=1e-4)


def test_layers_with_a_config_of_their_own_are_named_and_left_alone() -> None:
    model = made("VideoMAEForPreTraining", video())
    hidden = torch.arange(model.videomae.embeddings.num_patches).repeat(2, 1) % 3 > 0
    before = model(CLIPS, bool_masked_pos=hidden).logits
    report = swap(model, "Softmax")
    assert len(report.replaced) == 1
    assert all("a config of its own" in layer.why for layer in report.unchanged)
    torch.testing.assert_close(model(CLIPS, bool_masked_pos=hidden).logits, before, atol=1e-5, rtol=1e-4)


def test_a_pattern_that_fits_no_layer_is_an_error() -> None:
    model = nn.ModuleDict({"a": build("Bert"), "b": nn.TransformerEncoderLayer(16, 2)})
    assert len(swap(model, {"*layer.0.*": "LinearAttention", "b*": "LinearAttention"}).replaced) == 2
    with pytest.raises(ValueError, match=r"the pattern '\*layers\.7\*' fits no attention layer; there are a\.encoder"):
        swap(model, {"*layer.0.*": "LinearAttention", "*layers.7*": "Softmax"})
    assert not swap_back(model)
    with pytest.raises(Unsupported, match=r"no pattern names it; there are encoder\.layer\.0\.attention\.self, enc"):
        swap(build("Bert"), {"h.*": "LinearAttention"})


def test_random_generators_are_left_as_they_were(tmp_path: Any) -> None:
    """And draws depend on them: the same seed, the same features; another seed, others."""

    def drawn(seed: int) -> Tensor:
        model = build("Bert")
        torch.manual_seed(seed)
        swap(model, "FavorPlus(num_features=8)")
        assert torch.equal(torch.rand(3), torch.manual_seed(seed) and torch.rand(3))
        return out(model, inputs(model))

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    for model in (build("Bert"), nn.TransformerEncoderLayer(16, 2)):
        state = torch.get_rng_state()
        swap(model, "FavorPlus(num_features=8)")
        swap_back(model)
        assert torch.equal(torch.get_rng_state(), state)
    model = build("Bert")
    swap(model, "FavorPlus(num_features=8)")
    model.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    fast_attention.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_without_numbers_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(**ONE))
    with pytest.raises(Unsupported, match="BertModel has weights on the meta device"):
        swap(model, "LinearAttention")


@pytest.mark.parametrize("mechanism", ["FavorPlus", "LinearAttention", "Local(window=2)", "Linformer(rank=4)"])
def test_a_mechanism_on_the_meta_device_tells_shapes(mechanism: str) -> None:
    bound = fast_attention.Bound(mechanism, fast_attention.Shape(2, 8, 16)).to("meta")
    q, v = (torch.empty(1, 2, 9, 8, device="meta") for _ in range(2))
    made = bound(q, q, v)
    assert made.is_meta
    assert made.shape == v.shape
