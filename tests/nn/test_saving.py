"""Saved models: their dtypes come back, and what a file would not hold is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig

CONFIG = ModelConfig(vocab_size=5, mechanism="FavorPlus(num_features=8)", width=8, layers=1, heads=2, max_len=8)


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
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    saving.save(model, tmp_path)  # parted, and still equal
    with torch.no_grad():
        model.out.weight.add_(1.0)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"model.out.weight = model.embedding.weight"):
        saving.save(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
