"""Swapped models of transformers over processes: shards of ``input_ids`` in, the hidden states of one process out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fast_attention import TokenMixer, swap
from fast_attention.parallel import parallelize
from tests.parallel import join, leave, message, spread

transformers = pytest.importorskip("transformers")
LENGTHS = [9, 7]
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {"Llama": {"num_key_value_heads": 2}, "Bert": {}, "ModernBert": {"pad_token_id": 0}}
MECHANISMS = ("Local(window=3)", "FavorPlus(num_features=8)")


def made(kind: str, mechanism: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MODELS[kind], **settings)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    swap(model, mechanism)
    return model.double()


def compared(kind: str, mechanism: str, masked: bool, rank: int) -> float:
    """The largest difference of hidden states and of the parameters' gradients to one process."""
    one = made(kind, mechanism)
    spread = parallelize(copy.deepcopy(one), dist.group.WORLD)
    tokens, mask = torch.randint(3, 50, (2, 16), generator=torch.Generator().manual_seed(1)), torch.ones(2, 16).long()
    mask[1, 12:] = 1 - masked
    given, parts = ({"attention_mask": mask}, {"attention_mask": mask.split(LENGTHS, 1)[rank]}) if masked else ({}, {})
    wanted = one(input_ids=tokens, **given).last_hidden_state * mask[..., None]
    here = tokens.split(LENGTHS, 1)[rank], mask.split(LENGTHS, 1)[rank]
    out = spread(input_ids=here[0], **parts).last_hidden_state * here[1][..., None]
    direction = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(2))
    wanted.backward(direction)
    out.backward(direction.split(LENGTHS, 1)[rank])
    worst = float((out - wanted.split(LENGTHS, 1)[rank]).abs().max())
    for a, b in zip(one.parameters(), spread.parameters(), strict=True):
        if a.grad is not None:
            total = torch.zeros_like(a.grad) if b.grad is None else b.grad.contiguous()
            dist.all_reduce(total)
            worst = max(worst, float((total - a.grad).abs().max() / a.grad.abs().max().clamp_min(1)))
    return worst


def process(rank: int, folder: str) -> None:
    join(rank, 2, folder)
    results: dict[Any, Any] = {
        (kind, mechanism, masked): compared(kind, mechanism, masked, rank)
        for kind in MODELS for mechanism in MECHANISMS for masked in (False, True)
    }  # fmt: skip
    narrow = made("ModernBert", "Softmax()", local_attention=8)
    partly = nn.ModuleList([TokenMixer(16, 2), nn.MultiheadAttention(16, 2)])
    group, tokens = dist.group.WORLD, torch.ones(1, 5).long()
    results["cache"] = message(lambda: parallelize(made("Llama", "Local(window=3)"), group)(tokens, use_cache=True))
    results["window"] = message(lambda: parallelize(narrow, group)(tokens))
    results["kept"] = message(lambda: parallelize(partly, group))
    leave(results, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder: Path = tmp_path_factory.mktemp("processes")
    spread(process, (str(folder),), 2)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("kind", MODELS)
def test_hidden_states_and_gradients_are_those_of_one_process(results: list[dict[Any, Any]], kind: str) -> None:
    worst = {key: value for each in results for key, value in each.items() if key[0] == kind}
    assert len(worst) == 4
    assert all(value < 1e-11 for value in worst.values()), worst


def test_what_would_be_wrong_in_silence_is_refused(results: list[dict[Any, Any]]) -> None:
    assert all("has layers with a window" in each["window"] for each in results)
    assert all("would see this process's tokens only" in each["kept"] for each in results)


def test_a_cache_is_refused(results: list[dict[Any, Any]]) -> None:
    assert all("keeps no cache" in each["cache"] for each in results)
