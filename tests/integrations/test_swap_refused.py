"""What a swap must not serve: layers that attend twice, layers with attention of their own, caches that keep more."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from fast_attention import TokenMixer, swap, swap_back
from fast_attention.mechanism import Unsupported

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 99, "max_position_embeddings": 128,
}  # fmt: skip

BERT_LIKE: dict[str, Any] = {name: x for name, x in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}


def build(name: str, **settings: Any) -> tuple[nn.Module, torch.Tensor]:
    """A small model with random weights, and tokens for it; skipped where this release has none of that name."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this release of transformers has no {name}")
    config = getattr(transformers, f"{name}Config")(**SMALL, **settings)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval(), torch.randint(5, 99, (2, 17))


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["LinearAttention()", "Local(window=4)"])
def test_a_layer_that_attends_twice_gets_no_state(mechanism: str) -> None:
    """DiffLlama's two calls would both add their tokens to one state: queries of the second would see the future."""
    model, tokens = build("DiffLlama")
    exact = model(tokens).logits
    with pytest.raises(Unsupported, match=r"the layer attends 2 times in one pass of the model"):
        swap(model, mechanism)
    swap(model, "Softmax()")
    assert torch.equal(model(tokens).logits, exact)
    swap_back(model)
    assert torch.equal(model(tokens).logits, exact)


@torch.no_grad()
def test_a_layer_with_attention_of_its_own_is_kept() -> None:
    """MiniMax's lightning attention does not go through the interface; the layers beside it do."""
    model, tokens = build(
        "MiniMax", layer_types=["full_attention", "linear_attention"], num_local_experts=2, num_experts_per_tok=1
    )
    exact = model(tokens).logits
    report = swap(model, "Softmax()")
    assert [layer.name for layer in report.replaced] == ["model.layers.0.self_attn"]
    (own,) = report.unchanged
    assert own.mechanism == "its own attention"
    assert "forms attention itself" in own.why
    assert torch.equal(model(tokens).logits, exact)


@torch.no_grad()
def test_a_cache_that_keeps_more_than_keys_is_not_replaced() -> None:
    """Falcon-H1's layers keep a state of a convolution and of Mamba beside keys and values."""
    mamba = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_n_groups": 1}
    model, tokens = build("FalconH1", **mamba)
    swap(model, "LinearAttention()")
    with pytest.raises(Unsupported, match=r"more than keys and values"):
        model(tokens)
    changed = torch.cat([tokens[:, :-1], (tokens[:, -1:] + 7) % 90], 1)
    before, after = (model(x, use_cache=False).logits[:, :-1] for x in (tokens, changed))
    assert torch.equal(before, after)


def test_scores_that_no_mechanism_forms_are_named() -> None:
    """Gemma-2 squashes its scores: nothing is advised that would be refused again."""
    model, _ = build("Gemma2")
    with pytest.raises(Unsupported, match=r"changes its scores by softcap, which no mechanism does"):
        swap(model, "Softmax()")


def test_a_mask_that_a_model_makes_of_padding_is_found_at_the_swap() -> None:
    """MarkupLM makes one itself, for a padded batch alone: the first one would have been refused."""
    torch.manual_seed(0)
    model = transformers.MarkupLMModel(transformers.MarkupLMConfig(**BERT_LIKE, xpath_unit_hidden_size=4)).eval()
    with pytest.raises(Unsupported, match=r"MarkupLMModel does not run on a padded batch .* a mask of the model's own"):
        swap(model, "LinearAttention()")
    assert len(swap(model, "BlockLocal()").replaced) == 2
    mask = (torch.arange(9) < torch.tensor([[9], [5]])).long()
    assert model(torch.randint(5, 99, (2, 9)), attention_mask=mask)[0].isfinite().all()


@torch.no_grad()
def test_a_dense_mask_of_one_row_is_one_of_keys() -> None:
    """Switch's encoder adds a row of numbers to all scores: a window can serve it, padding included."""
    config = transformers.SwitchTransformersConfig(
        d_model=32, d_kv=8, num_heads=4, num_layers=2, num_decoder_layers=2, d_ff=48, vocab_size=99, num_experts=2,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.SwitchTransformersModel(config).eval()
    tokens, mask = torch.randint(5, 99, (2, 17)), torch.ones(2, 17)
    mask[1, 11:] = 0
    given = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": tokens[:, :9]}
    exact = model(**given).last_hidden_state
    report = swap(model, "Softmax()")
    assert len(report.replaced) == 6
    assert torch.allclose(model(**given).last_hidden_state, exact, atol=1e-5)
    swap(model, {"encoder.*": "Local(window=4)"})
    encoded = model.encoder(tokens[:1, :11], torch.ones(1, 11)).last_hidden_state
    assert torch.allclose(
        model.encoder(tokens[:1], (torch.arange(17) < 11).float()[None])[0][:, :11], encoded, atol=1e-5
    )


T5_LIKE: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 48, "vocab_size": 99,
}  # fmt: skip
OWN: dict[str, tuple[dict[str, Any], str]] = {
    "LongT5EncoderModel": (T5_LIKE, "LongT5LocalAttention (2 of them, the first is encoder.block.0.layer.0.LocalSelf"),
    "LongformerModel": (BERT_LIKE | {"attention_window": 4}, "LongformerSelfAttention (2 of them"),
    "LEDModel": (
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "vocab_size": 99, "attention_window": 4},
        "LEDEncoderSelfAttention (1 of them, the first is encoder.layers.0.self_attn.longformer_self_attn), "
        "LEDDecoderAttention (4",
    ),
    "BigBirdModel": (BERT_LIKE, "BigBirdBlockSparseAttention (2 of them, the first is encoder.layer.0.attention.self)"),
    "ReformerModel": (
        {
            "hidden_size": 32, "attn_layers": ["local", "lsh"], "attention_head_size": 8, "vocab_size": 99,
            "num_attention_heads": 4, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 8),
        },
        "LocalSelfAttention (1 of them, the first is encoder.layers.0.attention.self_attention), LSHSelfAttention (1",
    ),
    "FunnelModel": (
        {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "vocab_size": 99, "block_sizes": [1, 1]},
        "FunnelRelMultiheadAttention (4 of them",
    ),
    "XLNetModel": (
        {"d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 48, "vocab_size": 99}, "XLNetRelativeAttention (2 of them"
    ),
    "DebertaModel": (BERT_LIKE, "DisentangledSelfAttention (2 of them"),
    "DebertaV2Model": (BERT_LIKE, "DisentangledSelfAttention (2 of them"),
    "NystromformerModel": (BERT_LIKE, "NystromformerSelfAttention (2 of them"),
    "DogeModel": (SMALL, "DogeAttention (2 of them, the first is layers.0.self_attn)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_attention_of_a_models_own_is_named(name: str) -> None:
    """Its class and where it stands: "it has none" is said of models without attention only."""
    sizes, classes = OWN[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, name).config_class(**sizes)).eval()
    with pytest.raises(Unsupported, match=f"it has attention of its own, {re.escape(classes)}"):
        swap(model, "Softmax()")
    assert not swap_back(model)


@pytest.mark.parametrize("name", ["Mamba", "FNet"])
def test_a_model_without_attention_is_told_so(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(hidden_size=32, num_hidden_layers=1, vocab_size=99)
    with pytest.raises(Unsupported, match=rf"{name}Model called no attention .* it has none \({name.lower()}\)"):
        swap(getattr(transformers, f"{name}Model")(config).eval(), "Softmax()")


def test_layers_of_this_library_are_told_what_would_work() -> None:
    with pytest.raises(Unsupported, match=r"own layers \(TokenMixer 0\).* built with the other mechanism"):
        swap(nn.Sequential(TokenMixer(8, 2, "Softmax")), "Local")
