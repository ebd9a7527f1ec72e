"""Speech encoders with Transformer-XL's distances: exact, and in windows without scores of all pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import from_pretrained, swap, swap_back
from fast_attention.integrations import relative
from fast_attention.mechanism import Unsupported
from tests.integrations.test_swap import SMALL, gradients
from tests.integrations.test_swap_positions import Largest

transformers = pytest.importorskip("transformers")

SIZES = {**{name: size for name, size in SMALL.items() if name != "vocab_size"}, "attention_dropout": 0.0}
WAVES = {
    "vocab_size": 20, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer", "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "conv_depthwise_kernel_size": 3, "position_embeddings_type": "relative", "mask_time_prob": 0.0,
}  # fmt: skip
FEATURES = {"feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3, "mask_time_prob": 0.0}
MELS = {
    "num_mel_bins": 16, "conv_kernel_size": 3, "subsampling_conv_channels": 8, "max_position_embeddings": 1024,
    "dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "Wav2Vec2Conformer": ("Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", WAVES, (2, 400)),
    "Wav2Vec2Bert": (
        "Wav2Vec2BertModel", "Wav2Vec2BertConfig", {**FEATURES, "position_embeddings_type": "relative"}, (2, 30, 16)
    ),
    "Parakeet": ("ParakeetEncoder", "ParakeetEncoderConfig", MELS, (2, 240, 16)),
}  # fmt: skip


def build(name: str, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """The model with u and v that are not zero, and small inputs."""
    kind, config, sizes, shape = MODELS[name]
    torch.manual_seed(3)
    try:
        model = getattr(transformers, kind)(getattr(transformers, config)(**{**SIZES, **sizes, **settings})).eval()
    except AttributeError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if not model._can_set_attn_implementation():
        with pytest.raises(Unsupported, match="does not call its attention through transformers' attention interface"):
            swap(model, "Softmax()")
        pytest.skip(f"transformers {transformers.__version__} calls {name}'s attention directly: refused by name")
    for parameter, weight in model.named_parameters():
        if "bias_u" in parameter or "bias_v" in parameter:
            torch.nn.init.normal_(weight)
    return model, {model.main_input_name: torch.randn(shape)}


def padded(given: dict[str, Tensor]) -> dict[str, Tensor]:
    tokens = torch.ones(next(iter(given.values())).shape[:2], dtype=torch.long)
    tokens[0, tokens.shape[1] * 2 // 3 :] = 0
    return {**given, "attention_mask": tokens}


def outputs(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Those of all tokens of the second sequence and of half of the first."""
    hidden = model(**given).last_hidden_state
    return torch.cat([hidden[0, : hidden.shape[1] // 2], hidden[1]])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mechanism", ["Softmax()", "Local(window=99)", "Local(window=4)", "BlockLocal(block_size=4)"])
def test_the_models_own_distances(name: str, mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are the original's; in a window, those with the model's scores of all pairs as a mask."""
    model, given = build(name)
    given, exact = padded(given), mechanism in ("Softmax()", "Local(window=99)")
    with monkeypatch.context() as patched:
        if not exact:
            patched.setattr(relative, "of", lambda model, name: None)
            assert "TransformerXL" not in str(swap(model, mechanism, probe=given))
        expected = outputs(model, given)
        slopes = gradients(model, expected)
    report = swap(model, mechanism, probe=given)
    assert all(layer.mechanism.endswith("bias=TransformerXL(width=32))") for layer in report.layers)
    assert (len(report.unchanged), report.parameters) == (0, 0)
    actual = outputs(model, given)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    scale = max(float(x.abs().max()) for x in slopes if x is not None)
    for x, y in zip(slopes, gradients(model, actual), strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(y, x, atol=1e-5 * scale, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(("name", "shape"), [("Wav2Vec2Bert", (1, 1024, 16)), ("Parakeet", (1, 8192, 16))])
def test_nothing_is_as_large_as_queries_times_keys(name: str, shape: tuple[int, ...]) -> None:
    model, given = build(name)
    swap(model, "Local(window=16)", probe=given)
    with Largest() as largest:
        length = model(**{model.main_input_name: torch.randn(shape)}).last_hidden_state.shape[1]
    assert length == 1024
    assert largest.numbers < length * length


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_saved_loaded_and_swapped_back(name: str, tmp_path: Path) -> None:
    model, given = build(name)
    exact, keys = outputs(model, given), list(model.state_dict())
    swap(model, "Local(window=4)", probe=given)
    before = outputs(model, given)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(from_pretrained(tmp_path), given), before)
    assert swap_back(model)
    assert torch.equal(outputs(model, given), exact)
    assert not any(type(part).__module__.startswith("fast_attention") for part in model.modules())


@torch.no_grad()
def test_positions_of_another_kind_are_a_mask_of_every_pair() -> None:
    """Wav2Vec2-BERT's "relative_key" meets queries with a learned vector of every distance, which no bias here does."""
    model, given = build("Wav2Vec2Bert", position_embeddings_type="relative_key")
    before = outputs(model, given)
    report = swap(model, "Softmax()", probe=given)
    assert "it takes the position_bias as a mask of every pair" in str(report)
    torch.testing.assert_close(outputs(model, given), before, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_what_takes_no_bias_is_refused_with_what_would_work(name: str) -> None:
    model, given = build(name)
    with pytest.raises(
        Unsupported, match=r"adds TransformerXL\(width=32\) to its scores, which FavorPlus\(\) does not form"
    ):
        swap(model, "FavorPlus()", probe=given)
