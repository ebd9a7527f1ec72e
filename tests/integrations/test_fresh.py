"""A model that is built from a swapped model's config is an ordinary one; the swapped model stays as it is."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention import from_pretrained, swap, swap_back
from fast_attention.integrations.attention import layers_of
from fast_attention.integrations.fresh import BEFORE
from tests.integrations.test_swap import ALL, build, inputs, kinds, out
from tests.integrations.test_swap_probes import KINDS, first, made

transformers = pytest.importorskip("transformers")

WAYS: dict[str, Callable[[Any], Any]] = {
    "the config": lambda model: type(model)(model.config),
    "a copy": lambda model: type(model)(copy.deepcopy(model.config)),
    "pickled": lambda model: type(model)(pickle.loads(pickle.dumps(model.config))),
    "from_config": lambda model: type(model)._from_config(model.config),
    "of a copied model": lambda model: type(model)(copy.deepcopy(model).config),
    "as a dictionary": lambda model: type(model)(type(model.config)(**model.config.to_dict())),
}


def named(model: Any) -> set[str]:
    """The attention that the configs of a model's modules name."""
    return {part.config._attn_implementation for part in model.modules() if "config" in vars(part)}


@torch.no_grad()
@kinds(*ALL)
def test_a_model_of_a_swapped_models_config_is_an_ordinary_one(name: str) -> None:
    """By every way to such a config: what the original computes, to the bit, by the attention that it had."""
    for before in ("sdpa", "eager"):
        model = build(name)
        if before != model.config._attn_implementation and "mpt" not in model.config.model_type:
            model.set_attn_implementation(before)
        wanted, weights, kind = out(model, given := inputs(model)), model.state_dict(), named(model)
        swap(model, "Softmax")
        swapped = out(model, given)
        for way, make in WAYS.items():
            again = make(model).eval()
            again.load_state_dict(weights)
            assert "as a" in way or named(again) == kind, f"{way}: {named(again)}"
            assert not layers_of(again), way
            torch.testing.assert_close(out(again, given), wanted, atol=1e-6, rtol=1e-5, msg=way)
            own = {id(part.config) for part in again.modules() if "config" in vars(part)}
            theirs = {id(part.config) for part in model.modules() if "config" in vars(part)}
            assert len(own) == len(theirs), "modules go on sharing their config"
            assert not own & theirs, way
            assert not any(BEFORE in vars(part.config) for part in again.modules() if "config" in vars(part)), way
        assert torch.equal(out(model, given), swapped)
        assert swap(WAYS["the config"](model), "Softmax").replaced
        assert swap_back(model)
        assert torch.equal(out(model, given), wanted)
        assert not any(BEFORE in vars(part.config) for part in model.modules() if "config" in vars(part))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_models_made_of_models(kind: str) -> None:
    config, given, _ = KINDS[kind]
    model = made(kind, config())
    wanted, weights = first(model(**given)), model.state_dict()
    swap(model, "Softmax")
    swapped = first(model(**given))
    for way in ("the config", "a copy"):
        again = WAYS[way](model).eval()
        again.load_state_dict(weights)
        torch.testing.assert_close(first(again(**given)), wanted, atol=1e-6, rtol=1e-5)
        assert torch.equal(first(model(**given)), swapped)


def test_a_part_of_a_swapped_models_config() -> None:
    model = made("CLIPModel", KINDS["CLIPModel"][0]())
    swap(model, "LinearAttention")
    text = transformers.CLIPTextModel(model.config.text_config).eval()
    assert text(KINDS["CLIPModel"][1]["input_ids"]).last_hidden_state.isfinite().all()
    assert named(text) == {"sdpa"}


@torch.no_grad()
def test_the_config_of_a_folder_makes_ordinary_models(tmp_path: Path) -> None:
    """Which are saved and loaded as such; the folder's own model is still the swapped one."""
    model = build("Bert")
    swap(model, "FavorPlus(num_features=8)")
    given = inputs(model)
    model.save_pretrained(tmp_path / "swapped")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "swapped")
    for make in (transformers.AutoModel.from_config, transformers.BertModel):
        fresh = make(config).eval()
        assert named(fresh) == {"sdpa"}
        fresh.save_pretrained(tmp_path / "fresh")
        again = transformers.AutoModel.from_pretrained(tmp_path / "fresh").eval()
        assert torch.equal(out(again, given), out(fresh, given))
        assert not layers_of(again)
    assert torch.equal(out(transformers.AutoModel.from_pretrained(tmp_path / "swapped", config=config), given),
                       out(model, given))  # fmt: skip
    assert BEFORE not in (tmp_path / "swapped" / "config.json").read_text()
    assert "attn_implementation" not in json.loads((tmp_path / "fresh" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"was read by a config that names no mechanisms: leave config= out"):
        from_pretrained(tmp_path / "swapped", config=copy.deepcopy(model.config))


def test_attention_of_no_mechanism_is_refused(tmp_path: Path) -> None:
    """Whoever asks for it by name alone is told what would work, and gets no exact attention instead."""
    words = r"attn_implementation='fast_attention' names no mechanism.* fast_attention\.swap\(model"
    plain = build("Bert")
    plain.save_pretrained(tmp_path)
    for ask in (
        lambda: transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="fast_attention"),
        lambda: transformers.AutoModel.from_config(plain.config, attn_implementation="fast_attention"),
        lambda: transformers.BertModel(transformers.BertConfig(attn_implementation="fast_attention")),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
