"""What the commands say is so where time, the disk or a mechanism's abilities end, and where files are Windows'."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fast_attention import catalogue, conformance, exporting, swap
from fast_attention.data.fasta import parse_fasta
from fast_attention.lab import command_line, corpus, inputs, library_source, refusals, verdicts
from fast_attention.lab.advice.ranking import Question, advice, ranked
from fast_attention.lab.comparison import Comparison, Error
from fast_attention.lab.inputs import InputError
from fast_attention.lab.records import EXACT, Cell
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig

resource = pytest.importorskip("resource")
LATE = Cell("Local()", 512, "over budget", "the time was spent")
TIMED = Cell(EXACT, 512, "measured", forward_ms=1.0, forward_ratio=1.0)
DECODER = ModelConfig(vocab_size=8, width=8, heads=2, layers=1, max_len=16, causal=True)


def test_a_full_disk_in_the_words_of_other_libraries(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: every write beyond a size fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(Exception, match="os error") as full:
            save_file({"weight": torch.zeros(1000)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not isinstance(full.value, OSError)
    assert (refusals.refusal(full.value) or (None,))[0] == 1
    torch_s = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
    assert (refusals.refusal(torch_s) or (None,))[0] == 1


def test_no_time_is_no_verdict() -> None:
    """What was not timed may be faster and exact: nothing is said of it."""
    local, lsh = catalogue.parse("Local()"), catalogue.parse("LSH()")
    record = Comparison({}, [TIMED, LATE])
    assert verdicts.headline(record)[0].startswith("Nothing but exact attention was timed at 512 tokens")
    question = Question(512, 0.1)
    assert advice(record, ranked(record, [local], question), question) == [
        "At 512 tokens nothing but exact attention was timed: more --seconds may change that."
    ]
    record.cells.append(Cell("LSH()", 512, "measured", forward_ms=2.0, forward_ratio=2.0))
    record.errors.append(Error("LSH()", 512, "Softmax", [[0.5]]))
    said = advice(record, ranked(record, [local, lsh], question), question)
    assert said[-1] == "Not timed, for lack of --seconds: 1 more."
    assert said[0].startswith("At 512 tokens keep exact attention: of the 1 timed, nothing ")


def test_exact_attention_is_no_other_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["list", "Softmax"]) == 0
    assert "error:    exact attention\n" in capsys.readouterr().out
    assert "another function" in verdicts.kind(catalogue.parse("Softmax(scale=2.0)"))


@pytest.mark.parametrize("name", ["BigBird()", "Local()"])
def test_what_cannot_decode_claims_no_decoding(name: str) -> None:
    model: Any = Model(DECODER).eval()
    library_source.replace(model, catalogue.parse(name))
    found = {finding.law: finding.status for finding in conformance.check_model(model).findings}
    assert found["step by step is all at once"] == ("kept" if name == "Local()" else "not claimed")
    assert found["threads"] == "kept"


def test_what_cannot_decode_claims_no_decoding_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=8, n_positions=64, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    swap(model := transformers.GPT2LMHeadModel(config).eval(), "BigBird()")
    assert not conformance.check_model(model).broken


def test_files_that_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (path := tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"words")
    assert corpus.read(str(path)).documents == (("a.txt", "words"),)
    assert [protein.name for protein in parse_fasta(codecs.BOM_UTF8 + b">one\nMKV\n")] == ["one"]


def test_digits_of_other_kinds_are_no_numbers() -> None:
    for read in (inputs.head, lambda text: inputs.numbers("--rows", text)):
        with pytest.raises(InputError, match="²,0"):
            read("²,0")
    with pytest.raises(InputError, match="--memory-lengths -1"):
        inputs.lengths([-1], "--memory-lengths")


def test_an_export_that_cannot_be_written_or_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saving.save(Model(DECODER), tmp_path / "run")
    (tmp_path / "file").touch()
    command = ["export", str(tmp_path / "run"), "--out"]
    assert command_line.run([*command, str(tmp_path / "file" / "a.pt2")]) == 2
    assert capsys.readouterr().err == f"fast-attention: {tmp_path / 'file' / 'a.pt2'}: Not a directory\n"

    def unknown(path: Path) -> None:
        raise RuntimeError("INVALID_GRAPH: no such operator")

    monkeypatch.setattr(exporting, "load", unknown)
    monkeypatch.setattr(exporting, "save", lambda model, example, path, sizes: path.touch())
    assert command_line.run([*command, str(tmp_path / "a.pt2")]) == 2
    assert "a.pt2 cannot be run, perhaps for its --opset: INVALID_GRAPH" in capsys.readouterr().err
    assert not (tmp_path / "a.pt2").exists()
