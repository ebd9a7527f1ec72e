"""Saving loses no mechanism: those of ``nn.MultiheadAttention`` in a model, a swapped model's part, what holds one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fast_attention import LinearAttention, files, from_pretrained, swap, swap_back
from fast_attention.integrations import timm
from fast_attention.integrations.fresh import SKIPS
from fast_attention.mechanism import Unsupported
from fast_attention.nn.multihead import MultiheadAttention
from tests.integrations.test_swap import build, inputs, out
from tests.integrations.vision import TwinAttention

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
HEAD = "head.attention"


def siglip() -> Any:
    torch.manual_seed(0)
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIZES)).eval()


def pooled(model: Any) -> torch.Tensor:
    return model(torch.ones(2, 3, 32, 32).cumsum(-1) / 32).pooler_output


def clip() -> Any:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.CLIPConfig(text_config={**text, "vocab_size": 99}, vision_config=SIZES, projection_dim=16)
    return transformers.CLIPModel(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["LinearAttention()", "FavorPlus(num_features=8)", "Linformer(rank=4)"])
def test_a_pooling_head_comes_back(mechanism: str, tmp_path: Path) -> None:
    model = siglip()
    exact = pooled(model)
    report = swap(model, mechanism, max_len=32)
    assert len(report.replaced) == 2
    wanted = pooled(model)
    assert not torch.allclose(wanted, exact, atol=1e-5)
    model.save_pretrained(tmp_path)
    for load in (from_pretrained, transformers.AutoModel.from_pretrained):
        state = torch.get_rng_state()
        again = load(tmp_path)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(pooled(again), wanted)
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(pooled(from_pretrained(tmp_path / "again")), wanted)
    assert swap_back(again)
    assert torch.equal(pooled(again), exact)


def test_weights_of_a_pooling_head_that_a_file_lacks(tmp_path: Path) -> None:
    model = siglip()
    name = next(name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention))
    swap(model, "FavorPlus(num_features=8)")
    model.save_pretrained(tmp_path)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    digest = files.sha256(path)
    kept = {key: x for key, x in load_file(path).items() if f"{HEAD}.attention." not in key}
    save_file(kept, path, metadata={"format": "pt"})
    config.write_text(config.read_text().replace(digest, files.sha256(path)))
    with pytest.raises(ValueError, match=rf"missing: {name}\.attention\."):
        from_pretrained(tmp_path)
    config.write_text(config.read_text().replace('"nn.MultiheadAttention"', '"another"'))
    with pytest.raises(ValueError, match=rf"has no another called {name}"):
        from_pretrained(tmp_path)


@torch.no_grad()
def test_a_pooling_head_alone_is_refused_and_the_way_out_works(tmp_path: Path) -> None:
    for part in (siglip(), siglip().get_submodule("vision_model") if "vision_model" in siglip()._modules else siglip()):
        swap(part, {f"*{HEAD}": "FavorPlus(num_features=8)"})
        with pytest.raises(Unsupported, match=rf"only .*{HEAD} was swapped, an nn\.MultiheadAttention"):
            part.save_pretrained(tmp_path)
    model = siglip()
    holder = model.get_submodule(next(name for name, _ in model.named_modules() if name.endswith("head")))
    swap(holder, "FavorPlus(num_features=8)")
    with pytest.raises(Unsupported, match="only"):
        model.save_pretrained(tmp_path)
    wanted, state = pooled(model), model.state_dict()
    swap(model, {f"*{HEAD}": "FavorPlus(num_features=8)", "*": "Softmax()"})
    assert isinstance(holder.attention, MultiheadAttention)
    model.load_state_dict(state)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(pooled(from_pretrained(tmp_path)), wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_a_part_of_a_swapped_model_is_saved_swapped(name: str, tmp_path: Path) -> None:
    kind = {"Llama": "LlamaForCausalLM", "Bert": "BertForSequenceClassification"}[name]
    whole = getattr(transformers, kind)(build(name).config).eval()
    swap(whole, "FavorPlus(num_features=8)", skip_padding=name == "Bert")
    given = inputs(whole.base_model)
    whole.base_model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert type(again) is type(whole.base_model)
    assert torch.equal(out(again, given), out(whole.base_model, given))
    assert (SKIPS in vars(again.base_model)) == (name == "Bert")


@torch.no_grad()
def test_the_whole_around_a_swapped_part_is_refused(tmp_path: Path) -> None:
    llama = transformers.LlamaForCausalLM(build("Llama").config).eval()
    swap(llama.model, "FavorPlus(num_features=8)")
    both = clip()
    swap(both.vision_model, "LinearAttention")
    for model, part in ((llama, "model"), (both, "vision_model")):
        for save in (model.save_pretrained, type(model).save_pretrained.__get__(model)):
            with pytest.raises(Unsupported, match=rf"{type(model).__name__} was not swapped, but a part of it, {part}"):
                save(tmp_path)
    assert not [*tmp_path.iterdir()]
    both.text_model.save_pretrained(tmp_path / "text")
    tokens = torch.arange(5, 17)[None]
    wanted, state = llama(tokens).logits, llama.state_dict()
    swap(llama, {"model.*": "FavorPlus(num_features=8)"})
    llama.load_state_dict(state)
    llama.save_pretrained(tmp_path / "llama")
    torch.testing.assert_close(from_pretrained(tmp_path / "llama")(tokens).logits, wanted)
    assert swap_back(both.vision_model)
    both.save_pretrained(tmp_path / "clip")
    transformers.CLIPModel.from_pretrained(tmp_path / "clip")


def test_layers_of_timm_in_a_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "is_attention", lambda module: isinstance(module, TwinAttention))
    monkeypatch.setattr(timm, "_is_known", timm.is_attention)
    model = build("Bert")
    model.more = nn.ModuleList([TwinAttention(32, 4)])
    swap(model, "LinearAttention")
    with pytest.raises(Unsupported, match=r"timm's layers \(more\.0\)"):
        model.save_pretrained(tmp_path)


def test_parts_that_look_their_class_up_are_built_by_their_former_name(tmp_path: Path) -> None:
    """SAM's image encoder, none of whose layers is called through the interface."""
    torch.manual_seed(0)
    config = transformers.SamConfig(
        vision_config=transformers.SamVisionConfig(
            hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8,
            mlp_dim=48, num_pos_feats=8, window_size=2, global_attn_indexes=[1],
        ),
        prompt_encoder_config=transformers.SamPromptEncoderConfig(
            hidden_size=16, image_size=32, patch_size=8, mask_input_channels=4
        ),
        mask_decoder_config=transformers.SamMaskDecoderConfig(
            hidden_size=16, mlp_dim=32, num_hidden_layers=1, num_attention_heads=4, iou_head_hidden_dim=16
        ),
    )  # fmt: skip
    model = transformers.SamModel(config).eval()
    given = {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": 32 * torch.rand(1, 1, 2, 2)}
    swap(model, "LinearAttention", probe=given)
    with torch.no_grad():
        wanted = model(**given).pred_masks
        model.save_pretrained(tmp_path)
        for load in (transformers.AutoModel.from_pretrained, from_pretrained):
            again = load(tmp_path).eval()
            torch.testing.assert_close(again(**given).pred_masks, wanted, rtol=1e-5, atol=1e-9)
            assert again.config._attn_implementation == "fast_attention"


def test_a_function_is_refused_where_it_would_not_be_read_back(tmp_path: Path) -> None:
    """Its files were written, and could not be loaded."""
    swap(model := build("Llama"), LinearAttention(feature_map=torch.exp))
    with pytest.raises(Unsupported, match="a class in place of a function"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
