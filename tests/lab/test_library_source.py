"""Queries, keys and values of this library's own models, for ``compare``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention import Softmax, cli, data
from fast_attention.lab import library_source, loading
from fast_attention.lab.inputs import InputError
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks import ProteinMLM, proteins
from fast_attention.tasks.task import IGNORED


def saved(folder: Path, **options: Any) -> Model:
    torch.manual_seed(2)
    settings: dict[str, Any] = {"vocab_size": 23, "width": 16, "heads": 2, "max_len": 64, "reads": "residues"}
    model = Model(ModelConfig(**{**settings, **options})).eval()
    saving.save(model, folder)
    return model


def test_what_the_layers_attend_with(tmp_path: Path) -> None:
    """The captured tensors, attended to anew, make the model's own next layer."""
    model = saved(tmp_path, layers=3, positions="learned")
    source = library_source.LibrarySource(tmp_path, "mine")
    layers, read = source.layers(40)
    assert [layer.name for layer in layers] == ["layer 0", "layer 1", "layer 2"]
    assert read.startswith("the first 40 residues of ")
    assert (source.heads, source.head_dim, source.context, source.is_causal) == (2, 8, 64, False)
    tokens = library_source.encoded(source.corpus.passage(40)[1])[:40].long()[None]
    x = model.places(model.embedding(tokens))  # type: ignore[misc]
    for layer, block in zip(layers, model.blocks, strict=True):
        mixed = block.f.mixer._output(Softmax()(layer.q, layer.k, layer.v))
        x = x + mixed
        x = x + block.g(x)
    torch.testing.assert_close(model.norm(x), model.hidden(tokens), rtol=1e-5, atol=1e-5)


def test_a_folder_that_train_made_is_told_from_others(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "model")
    assert loading.find(tmp_path / "run")[1:] == (tmp_path / "run" / "model", True)
    assert loading.find(tmp_path / "run" / "model")[1:] == (tmp_path / "run" / "model", True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert loading.find(tmp_path)[1:] == (tmp_path, False)
    assert loading.find("protein-mini").ours


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ({}, {"text": "x.txt"}, "reads proteins"),
        ({"reads": "bytes", "vocab_size": 256}, {"fasta": "sample"}, "reads text"),
        ({"reads": ""}, {}, "its task's own"),
    ],
)
def test_what_a_model_does_not_read(options: dict[str, Any], given: dict[str, str], words: str, tmp_path: Path) -> None:
    saved(tmp_path, **options)
    with pytest.raises(InputError, match=words):
        library_source.LibrarySource(tmp_path, "mine", **given)


def test_without_queries_and_keys_there_is_nothing_to_compare(tmp_path: Path) -> None:
    saved(tmp_path, mechanism="FNet()")
    with pytest.raises(InputError, match="queries and keys"):
        library_source.LibrarySource(tmp_path, "mine").layers(8)


def test_compare_reads_with_an_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "run" / "model")
    words = ["compare", "--model", str(tmp_path / "run"), "--mechanisms", "LinearAttention()", "Local(window=4)"]
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--lengths", "16", "32", "--budget", "20", "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert not stop.value.code, said.err
    record = json.loads((tmp_path / "out" / "records.json").read_text())
    assert "encoder of this library" in record["meta"]["source"]
    assert "UniProt" in record["meta"]["source"]
    assert {error["mechanism"] for error in record["errors"]} == {"Local(window=4)"}


def test_shipped_models_are_whole(tmp_path: Path) -> None:
    assert {*data.models()} == {"protein-mini"}
    licences = (Path(data.__file__).parent / "LICENSES.md").read_text()
    for name, folder in data.models().items():
        said = licences.split(f"## {name}")[1].split("\n## ")[0]
        assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() in said
        record = json.loads((folder / "record.json").read_text())
        best = record["outcome"]["best"]
        assert best == min(point["valid"] for point in record["curve"])
        assert best < min(record["baselines"].values())
        assert saving.load(folder).config.reads in ("bytes", "residues")
        assert (folder / "record.json").is_file()
        assert sum(path.stat().st_size for path in folder.iterdir()) < 8 * 2**20


def test_the_shipped_model_has_learnt_what_its_record_says() -> None:
    """On shipped proteins, most of which it has seen, hidden places only: better than the composition of each one."""
    task = ProteinMLM(context=256, share=0.2)
    model = saving.load(data.models()["protein-mini"])
    loss, count = 0.0, 0
    with torch.no_grad():
        for index in range(4):
            tokens, targets, key_mask = task.batch("valid", index, 8)
            asked = (targets != IGNORED) & (tokens == proteins.MASK)
            logits = model(tokens, key_mask)[asked]
            loss += float(torch.nn.functional.cross_entropy(logits, targets[asked], reduction="sum"))
            count += int(asked.sum())
    assert count > 500
    assert loss / count < task.baselines()["the protein's own composition"] - 0.02
