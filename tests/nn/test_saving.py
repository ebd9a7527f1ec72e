"""Saved models: their dtypes come back, and what a file would not hold is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fast_attention import LinearAttention, convert
from fast_attention.catalogue import parse
from fast_attention.feature_maps.features import FeatureMap
from fast_attention.mechanism import Unsupported
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks import Batch

CONFIG = ModelConfig(vocab_size=5, mechanism="FavorPlus(num_features=8)", width=8, layers=1, heads=2, max_len=8)
BATCH = Batch(torch.zeros(1, 4).long(), torch.zeros(1, 4).long())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Read as float32, a model of float64 would lose half its digits."""
    torch.manual_seed(0)
    model = Model(CONFIG).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.norm.float()
    saving.save(model, tmp_path)
    state = saving.load(tmp_path).state_dict()
    for name, saved in model.state_dict().items():
        assert state[name].dtype == saved.dtype
        assert torch.equal(state[name], saved)


def test_a_head_that_has_left_its_embedding_is_not_lost_in_silence(tmp_path: Path) -> None:
    model = Model(CONFIG)
    model.out.weight = torch.nn.Parameter(model.embedding.weight.detach().clone())
    saving.save(model, tmp_path)  # parted, and still equal
    with torch.no_grad():
        model.out.weight.add_(1.0)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"model.out.weight = model.embedding.weight"):
        saving.save(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_layer_with_another_mechanism_is_saved_as_it_is(tmp_path: Path) -> None:
    model = Model(CONFIG)
    model.blocks[0].f.mixer = model.blocks[0].f.mixer.with_mechanism(parse("Local(window=2)"))
    saving.save(model, tmp_path)
    assert saving.load(tmp_path).config.mechanism == "Local(window=2)"


@dataclass(frozen=True, repr=False)
class Relu(FeatureMap):
    """A user's own, of a name that this library uses too."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() ** 3 + 0.5


def test_a_mechanism_that_its_expression_does_not_give_is_refused(tmp_path: Path) -> None:
    """It would be loaded as another."""
    config = ModelConfig(vocab_size=5, mechanism="Softmax()", width=8, layers=1, heads=2, positions="learned")
    model, mechanism = Model(config), LinearAttention(feature_map=Relu())
    model.blocks[0].f.mixer = model.blocks[0].f.mixer.with_mechanism(mechanism)
    with pytest.raises(Unsupported, match="which does not give it back"):
        saving.save(model, tmp_path)
    with pytest.raises(Unsupported, match="which does not give it back"):
        convert(Model(config), mechanism, lambda _: BATCH, [BATCH])
