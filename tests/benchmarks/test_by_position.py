"""The benchmark of a decoder by position: means between edges, the same tokens for every reader, the record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import by_position

transformers = pytest.importorskip("transformers")


def test_means_between_edges_are_of_their_positions() -> None:
    values = torch.arange(1.0, 16.0)  # of positions 1 to 15: each its own number
    assert by_position.by_position(values, (0, 4, 8, 16)) == [2.0, 5.5, 11.5]
    assert by_position.by_position(values[:7], (0, 4, 8, 16)) == [2.0, 5.5, None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(hidden_size=16, vocab_size=384, max_position_embeddings=16, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(home)
    transformers.ByT5Tokenizer().save_pretrained(home)
    (home / "unseen.txt").write_text(" ".join(f"word{(7 * i * i) % 101}" for i in range(200)))
    return home


def test_every_reader_reads_the_same_passages(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(by_position, "EDGES", (0, 8, 16, 64))
    given = ["--folder", str(folder), "--mechanisms", "Local(window=64)", "Local(window=2)", "--passages", "3"]
    monkeypatch.setattr(sys, "argv", ["by_position", *given, "--out", str(tmp_path / "record.json")])
    by_position.main()
    held = json.loads((tmp_path / "record.json").read_text())
    rows = {row["reader"]: row["bits_per_byte"] for row in held["rows"]}
    short, beyond, exact, window, narrow = rows.values()
    assert short[2] is None
    assert None not in beyond
    assert window == pytest.approx(exact, rel=1e-4)  # the window covers all 64 tokens
    assert narrow[2] != pytest.approx(exact[2], rel=1e-6)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    text = (folder / "unseen.txt").read_text()
    ids = torch.tensor(transformers.ByT5Tokenizer()(text, add_special_tokens=False)["input_ids"])
    passages = ids[: len(ids) // 64 * 64].view(-1, 64)
    passages = passages[:: len(passages) // 3][:3]
    with torch.no_grad():
        logits = model(passages).logits.log_softmax(-1)[:, :-1]
    nats = -logits.gather(-1, passages[:, 1:, None])[..., 0].mean(0)
    bits = nats / torch.log(torch.tensor(2.0)) * len(ids) / len(text.encode())
    assert beyond == pytest.approx([float(part.mean()) for part in (bits[:7], bits[7:15], bits[15:])], rel=1e-4)
    assert "Local(window=2)" in capsys.readouterr().out
