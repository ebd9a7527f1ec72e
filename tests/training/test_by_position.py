"""Losses by position: the buckets, and what falls into each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fast_attention import tasks
from fast_attention.training import by_position
from fast_attention.training.processes import Group
from fast_attention.training.settings import TrainingSettings

SETTINGS = TrainingSettings(steps=1, batch_size=3, evaluation_batches=2)
ALONE = Group(0, 1, torch.device("cpu"))


class SureUpTo(nn.Module):
    """Predicts ``a`` without doubt before a position, and any byte from there on."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position

    def forward(self, tokens: Tensor, key_mask: Tensor | None) -> Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        logits[:, : self.position, ord("a")] = 100.0
        return logits


def test_buckets_double_and_end_with_the_sequence() -> None:
    assert by_position.buckets(20) == [(0, 19)]
    assert by_position.buckets(32) == [(0, 31)]
    assert by_position.buckets(33) == [(0, 31), (32, 32)]
    assert by_position.buckets(8192) == [
        (0, 31), (32, 63), (64, 127), (128, 255), (256, 511), (512, 1023), (1024, 2047), (2048, 8191)
    ]  # fmt: skip


@pytest.mark.parametrize(("position", "losses"), [(32, [0, 8, 8]), (64, [0, 0, 8]), (16, [4, 8, 8]), (48, [0, 4, 8])])
def test_a_loss_falls_into_the_bucket_of_its_position(position: int, losses: list[float], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a" * 10_000)
    task = tasks.parse(f"ByteLM(path={str(tmp_path / 'text')!r}, context=100)")
    rows = by_position.loss_by_position(SureUpTo(position), task, SETTINGS, ALONE)
    assert [(first, last) for first, last, _ in rows] == [(0, 31), (32, 63), (64, 99)]
    assert [loss for *_, loss in rows] == pytest.approx(losses, abs=1e-6)


def test_only_causal_losses_have_positions() -> None:
    applies = {name: by_position.applies(tasks.parse(name)) for name in ("byte-lm", "mqar", "protein-mlm")}
    assert applies == {"byte-lm": True, "mqar": False, "protein-mlm": False}
