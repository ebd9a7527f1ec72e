"""The tutorial's commands, in order, shortened: fewer steps, small models, short sequences."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from fast_attention import cli

ROOT = Path(__file__).parent.parent
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = "\n".join(re.findall(r"```sh\n(.*?)```", TUTORIAL, re.S)).split("\n")
SHORTER = (
    (r"--minutes \S+|--steps \d+", "--steps 3"),
    (r"--seeds \d+", "--seeds 1"),
    (r"--lengths \d+", "--lengths 64"),
    (r"--tokens \d+", "--tokens 5"),
    (r"train byte-lm", "train 'ByteLM(context=32)'"),
    (r"context=256", "context=64"),
)


def test_every_command_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(ROOT)  # experiments run from a checkout
    commands = [line for line in COMMANDS if line]
    assert len(commands) == 5
    for line in commands:
        for pattern, shorter in SHORTER:
            line = re.sub(pattern, lambda _, shorter=shorter: shorter, line)
        program, *words = shlex.split(line.replace("out/", f"{tmp_path}/"))
        if program == "python":
            _, module, *options = words
            small = ["--width", "16", "--heads", "2", "--batch-size", "2"] if "generate" not in module else []
            assert importlib.import_module(module).main([*options, *small]) == 0, line
            continue
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert not stop.value.code, line
    for made in ("compare/report.html", "protein/model", "study/study.svg", "bytes/log.jsonl"):
        assert (tmp_path / made).exists(), made
