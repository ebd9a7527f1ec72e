"""The benchmark of long texts: the original with more positions beside what was swapped or converted, in turns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import long_texts

pytest.importorskip("transformers")


def test_both_models_are_timed_beyond_their_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "long.json"
    monkeypatch.setattr(sys, "argv", ["long_texts", "--lengths", "16", "520", "--out", str(out)])
    long_texts.main()
    record = json.loads(out.read_text())
    measured = {(row["model"], row["length"]): row for row in record["prices"]}
    assert {*measured} == {(name, n) for name in ("original", "BlockLocal(block_size=256)") for n in (16, 520)}
    assert all(row["seconds"] > row["attention_seconds"] > 0 for row in measured.values())
    assert "520" in capsys.readouterr().out


def test_a_converted_model_gets_the_positions_that_it_lacks(tmp_path: Path) -> None:
    held = long_texts.models(None, "BlockLocal(block_size=256)", 600)
    held["BlockLocal(block_size=256)"].save_pretrained(tmp_path)
    original, converted = long_texts.models(tmp_path, "", 700).values()
    ids = torch.randint(1000, (1, 300))
    with torch.no_grad():
        one, two = (model(input_ids=ids).last_hidden_state for model in (original, converted))
    assert torch.equal(one, two)  # exact up to 512 tokens
    assert converted.config.max_position_embeddings == original.config.max_position_embeddings == 700
