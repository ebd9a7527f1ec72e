"""``swap(model)`` in training: the Trainer, autocast, dropout, and models of a real size at real lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fast_attention import swap
from fast_attention.integrations import calls
from fast_attention.integrations.exact.attention import attention
from fast_attention.integrations.visible import Visibility
from tests.hf import families
from tests.hf.test_families import GRADIENTS, SAME, away, both, first

IDS = torch.randint(3, families.VOCABULARY, (4, 300), generator=torch.Generator().manual_seed(2))


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens to be predicted."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[index], "labels": IDS[index]}


def losses(folder: Path, swapped: bool, **settings: Any) -> list[float]:
    model = families.decoder("Mistral", max_position_embeddings=400)
    if swapped:
        assert swap(model).gains
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], seed=0,
        use_cpu=True, save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str)
def test_the_trainer_takes_the_same_steps(tmp_path: Path, settings: dict[str, Any]) -> None:
    wanted = losses(tmp_path, False, **settings)
    got = losses(tmp_path, True, **settings)
    assert len(wanted) == 3
    assert got == pytest.approx(wanted, rel=1e-2 if settings.get("bf16") else 1e-4)


def test_dropout_drops_as_much() -> None:
    """Not the same weights: outputs agree on average."""
    model = families.encoder("ModernBert", max_position_embeddings=400, attention_dropout=0.3)
    swap(model)
    model.train()
    with torch.no_grad():
        ids = IDS[:1].expand(16, -1)
        means = []
        for context in (calls.original, calls.forced):
            torch.manual_seed(0)
            with context():
                means.append(torch.stack([first(model(ids)).mean(0) for _ in range(4)]).mean(0))
        model.eval()
        exact = first(model(ids[:1]))[0]
    apart, off = ((x - y).square().mean().sqrt() for x, y in (means, (means[0], exact)))
    assert not torch.equal(*means)
    assert apart < 2 * off


def test_autocast_is_as_near_as_the_original() -> None:
    model = families.encoder("ModernBert", max_position_embeddings=400)
    with torch.no_grad():
        exact = first(model(IDS))
        swap(model)
        with torch.autocast("cpu", torch.bfloat16):
            wanted, got = both(lambda: first(model(IDS)).float())
    errors = [(x - exact).square().mean().sqrt() for x in (wanted, got)]
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_unknown_tensors_are_unknown_when_a_layer_is_computed_again(reentrant: bool) -> None:
    """In the backward pass, where the call that knew its arguments is over."""
    module = families.decoder("Mistral").model.layers[0].self_attn
    q = torch.randn(1, 4, 20, 8, requires_grad=True)
    for name, known in (("num_items_in_batch", True), ("block_indices", False)):
        masked = []

        def dense(masked: list[int] = masked) -> Tensor:
            masked.append(1)
            return torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()

        seen = Visibility(dense, is_causal=True, keys_left=3, harmless=set())

        def run(x: Tensor, name: str = name, seen: Visibility = seen) -> Tensor:
            return attention("sdpa", module, x, x[:, :2], x[:, :2], seen, **{name: torch.ones(1)})[0]

        calls.begin(module, arguments=frozenset({"num_items_in_batch"}))
        out = checkpoint(run, q, use_reentrant=reentrant)
        calls.end(module)
        out.sum().backward()
        assert len(masked) == (0 if known else 2)


def test_a_model_of_middle_size_at_its_own_lengths() -> None:
    """Forward and every gradient, above the length where tiles begin, a padded batch beside it."""
    settings = {"hidden_size": 128, "intermediate_size": 192, "local_attention": 64, "max_position_embeddings": 1024}
    model = families.encoder("ModernBert", **settings)
    report = swap(model)
    (start,) = {layer.faster_from for layer in report.faster}
    assert start is not None
    ids = torch.randint(3, families.VOCABULARY, (2, 2 * start + 37))
    mask = torch.ones_like(ids)
    mask[1, start + 11 :] = 0
    model.train()
    found = report.verify({"input_ids": ids, "attention_mask": mask})
    assert found.same
    assert found.difference < SAME
    assert found.gradients is not None
    assert found.gradients < GRADIENTS


@torch.no_grad()
def test_decoders_that_embed_in_both_directions() -> None:
    """EmbeddingGemma's configuration: windows on either side, and padding is skipped."""
    config = families.config_of("Gemma3Text", use_bidirectional_attention=True)
    torch.manual_seed(0)
    model = families.spread(transformers.AutoModel.from_config(config).eval())
    report = swap(model)
    assert any("ahead" in layer.computes for layer in report.layers)
    ids = IDS[:, :40]
    mask = torch.ones_like(ids)
    mask[0, 20:] = 0
    for given in (torch.ones_like(ids), mask, mask.flip(-1)):
        wanted, got = both(lambda given=given: first(model(ids, attention_mask=given)))
        assert away(wanted, got, given) < SAME
