"""The commands that train a model and let it go on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention.lab import commands
from fast_attention.lab.learning import curve, grid
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks.needle import Needle
from fast_attention.tasks.recall import Copy
from fast_attention.training import checkpoints, journal
from fast_attention.training.settings import TrainingSettings

SMALL = ["--width", "16", "--heads", "2", "--layers", "2"]


def test_training_leaves_model_curve_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "Copy(symbols=4, words=3)", "--mechanism", "FavorPlus(num_features=8)", "Softmax", *SMALL]
    out = ["--out", str(tmp_path)]
    assert commands.run([*words, "--steps", "20", "--evaluate-every", "10", *out]) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    best = result["outcome"]["best"]
    assert curve.in_words(best, "accuracy") in said
    assert "25 %" in said  # the baseline
    assert "chance" in said
    assert result["model"]["mechanism"] == ["FavorPlus(num_features=8)", "Softmax()"]
    assert saving.load(tmp_path / "model").config.mechanisms == result["model"]["mechanism"]
    drawn = (tmp_path / "curve.svg").read_text()
    assert drawn.startswith("<svg")
    assert "chance 25 %" in drawn
    assert [line["step"] for line in journal.read(tmp_path) if "valid" in line] == [0, 10, 20]
    assert commands.run([*words, "--steps", "20", *out]) == 2
    assert "holds a run" in capsys.readouterr().err
    assert commands.run([*words, "--steps", "30", "--resume", *out]) == 0
    assert "step_20" in capsys.readouterr().err
    assert checkpoints.find_all(tmp_path / "checkpoints")[0].name == "step_30"


@pytest.mark.parametrize("name", ["checkpoint", "report.json"])
def test_the_folder_of_a_conversion_is_left_alone(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).touch()
    assert commands.run(["train", "copy", *SMALL, "--steps", "1", "--restart", "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} holds a conversion: name another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_data_that_will_not_do_leave_no_folder_and_clear_nothing_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").touch()
    task, wanted = f"ByteLM('{tmp_path}/empty.txt')", sorted(tmp_path.rglob("*"))
    for name in ("run", "none/here"):
        words = ["train", task, *SMALL, "--steps", "1", "--restart", "--out", str(tmp_path / name)]
        assert commands.run(words) == 2
        assert "0 bytes for training" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == wanted


def test_options_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[training]\nsteps = 3\nlr = 0.5\nbatch_size = 3\n[model]\nwidth = 8\nheads = 2\nmechanism = "FNet"\n'
    )
    words = ["train", "copy", "--config", str(file), "--lr", "0.001", "--out", str(tmp_path / "run")]
    assert commands.run([*words]) == 2  # FNet is not causal
    assert commands.run([*words, "--mechanism", "LinearAttention"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["settings"]["lr"] == 0.001
    assert result["settings"]["batch_size"] == 3
    assert result["settings"]["steps"] == 3
    assert result["model"]["width"] == 8
    assert result["model"]["mechanism"] == "LinearAttention()"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["copi"], "copi"),
        (["copy", "--mechanism", "Softmx"], "Softmax"),
        (["copy", "--mechanism", "FNet"], "FNet() does not support"),
        (["copy", "--config", "none.toml"], "none.toml: No such file"),
        (["copy", "--max-len", "10", "--positions", "learned"], "max_len=10"),
        (["copy", "--device", "cuda:77"], "cuda:77"),
        (["copy", "--heads", "3"], "multiple of heads=3"),
        (["copy", "--precision", "float8"], "float8"),
        (["copy", "--steps", "0"], "steps or minutes"),
        (["ByteLM(path='/no/such/file')"], "/no/such/file"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run(["train", *words, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert said.count("\n") == 0
    assert not (tmp_path / "run" / "model").exists()


def test_a_full_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_dump", full)
    assert commands.run(["train", "copy", *SMALL, "--steps", "2", "--out", str(tmp_path)]) == 1
    assert "step_2 could not be written: No space left on device; there is none before it" in capsys.readouterr().err


def test_sigterm_saves_and_ends_the_command(tmp_path: Path) -> None:
    words = ["train", "copy", *SMALL, "--steps", "1000000", "--out", str(tmp_path)]
    run = subprocess.Popen(
        [sys.executable, "-m", "fast_attention.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not any("loss" in line for line in journal.read(tmp_path)):
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    began = time.monotonic()
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 130, said
    assert time.monotonic() - began < 10
    last = checkpoints.newest(tmp_path / "checkpoints", pytest.fail)
    assert last is not None
    assert f"saved at step {int(last.name.split('_')[1]):,}" in said


def decoder(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    saving.save(Model(ModelConfig(**{"width": 16, "heads": 2, "max_len": 30, "causal": True, **settings})), folder)
    return folder


def test_a_model_of_bytes_goes_on_with_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = decoder(tmp_path / "run" / "model", vocab_size=256, reads="bytes", mechanism="LinearAttention()").parent
    said = []
    for words in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--beams", "2"], ["--temperature", "0"]):
        assert commands.run(["generate", str(folder), "--prompt", "Zoë", "--tokens", "20", *words]) == 0
        said.append(capfd.readouterr().out)
    assert said[0] == said[1] != said[2]
    assert all(1 < len(text) <= 21 for text in said)
    assert commands.run(["generate", str(folder)]) == 0
    assert len(capfd.readouterr().out) > 1


def test_a_model_of_numbers_goes_on_with_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = decoder(tmp_path, vocab_size=9, positions="none")
    assert commands.run(["generate", str(folder), "--prompt", "3 1, 2", "--tokens", "40"]) == 0
    made = [int(word) for word in capsys.readouterr().out.split()]
    assert len(made) == 40
    assert max(made) < 9


@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [
        ({}, [], "--prompt is missing: this model reads numbers from 0 to 8"),
        ({}, ["--prompt", "3 9"], "numbers from 0 to 8"),
        (
            {"positions": "learned"},
            ["--prompt", "1 2", "--tokens", "30"],
            "--tokens 30: the model reads 30 tokens and the prompt has 2",
        ),
        (
            {"positions": "learned"},
            ["--prompt", "1 " * 31],
            "--prompt: the model reads 30 tokens and the prompt has 31",
        ),
        ({}, ["--prompt", "1", "--top-p", "0"], "top_p"),
        ({"causal": False}, ["--prompt", "1"], "needs a decoder"),
    ],
)
def test_what_cannot_go_on_is_one_line(
    settings: Any, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run(["generate", str(decoder(tmp_path, vocab_size=9, **settings)), *words]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert said.count("\n") == 0


def test_a_folder_without_a_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["generate", str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err


def test_the_picture_says_what_it_shows() -> None:
    log = [{"step": 0, "valid": 0.25}, {"step": 5, "loss": 1.0}, {"step": 9, "valid": 0.5}]
    drawn = curve.drawn(log, Copy(), {"chance": 0.1}, "copy, Softmax()")
    assert drawn.alt == "copy, Softmax(): 50 % after 9 steps; chance 10 %"
    assert drawn.alt in drawn.svg
    assert curve.in_words(2.7114, "nats") == "2.711 nats"


@pytest.mark.parametrize(("sight", "reached"), [(10**6, [0.0, 0.25, 0.5, 0.75, 1.0]), (150, [1.0]), (20, [])])
def test_needles_are_asked_for_at_every_depth(
    sight: int, reached: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a reader in the model's place that sees so many bytes back: the grid ends where its sight does."""

    def reader(tokens: torch.Tensor, key_mask: None) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        for row, text in enumerate(bytes(line.tolist()) for line in tokens):
            key = text[text.rindex(b"key of ") + 7 :][:5]
            found = re.search(b"key of " + key + rb" is (\d{4})\. ", text[-sight:])
            for place, digit in enumerate(found[1] if found else b""):
                logits[row, place - 4, digit] = 1.0
        return logits

    monkeypatch.setattr(grid.saving, "load", lambda folder, device: reader)
    settings = TrainingSettings(batch_size=5, evaluation_batches=2)
    cells = grid.recalled(tmp_path, Needle(context=600), settings)
    assert [(cell["length"], cell["depth"]) for cell in cells] == [(n, d) for n in (150, 300, 600) for d in grid.DEPTHS]
    longest = {cell["depth"] for cell in cells if cell["length"] == 600 and cell["recalled"] == 1.0}
    assert longest == {*reached}
    assert all(cell["recalled"] in (0.0, 1.0) for cell in cells)


def test_a_needle_run_ends_with_its_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "Needle(context=128)", "--steps", "1", "--batch-size", "2", *SMALL, "--out", str(tmp_path)]
    assert commands.run(words) == 0
    assert "answers recalled" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "result.json").read_text())["recalled"]) == 5
