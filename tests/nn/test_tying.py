"""A head that shares the embedding's weights shares them after torch has moved or loaded them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fast_attention.nn.models import Model, ModelConfig

CONFIG = ModelConfig(vocab_size=11, mechanism="FavorPlus(num_features=4)", width=8, heads=2, max_len=9, causal=True)


def on_meta() -> Any:
    with torch.device("meta"):
        return nn.ModuleDict({"inner": Model(CONFIG)})


def trained(model: nn.Module) -> torch.Tensor:
    """What two steps make of the embedding."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(9)[None]).square().mean().backward()
        optimizer.step()
    return model.embedding.weight  # type: ignore[return-value]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_a_model_from_the_meta_device_trains_as_one_made_at_once(assign: bool, shared: bool) -> None:
    model = Model(CONFIG)
    state = {f"inner.{name}": x.clone() if not shared else x for name, x in copy.deepcopy(model).state_dict().items()}
    outer = on_meta()
    if not assign:
        outer.to_empty(device="cpu")
    outer.load_state_dict(state, assign=assign)
    assert outer["inner"].out.weight is outer["inner"].embedding.weight
    torch.testing.assert_close(trained(outer["inner"]), trained(model), rtol=0, atol=0)


@pytest.mark.parametrize("left_out", ["inner.out.weight", "inner.embedding.weight"])
def test_a_state_may_name_the_shared_weights_once(left_out: str) -> None:
    model, outer = Model(CONFIG), on_meta()
    state = {f"inner.{name}": x.clone() for name, x in model.state_dict().items()}
    del state[left_out]
    outer.load_state_dict(state, assign=True, strict=False)
    assert outer["inner"].out.weight is outer["inner"].embedding.weight
    torch.testing.assert_close(trained(outer["inner"]), trained(model), rtol=0, atol=0)


def test_weights_that_differ_stay_apart() -> None:
    outer = on_meta()
    state = {f"inner.{name}": x.clone() for name, x in Model(CONFIG).state_dict().items()}
    state["inner.out.weight"] += 1.0
    outer.load_state_dict(state, assign=True)
    torch.testing.assert_close(outer["inner"].out.weight, outer["inner"].embedding.weight + 1.0)


def test_a_head_that_was_given_its_own_weights_keeps_them() -> None:
    model = Model(CONFIG)
    model.out.weight = nn.Parameter(model.embedding.weight.detach().clone())
    model.load_state_dict(model.state_dict())
    model.to(torch.float64)
    assert model.out.weight is not model.embedding.weight
    assert len(dict(copy.deepcopy(model).named_parameters())) == len(dict(model.named_parameters()))
