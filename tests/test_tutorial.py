"""The tutorial's commands, in order, shortened: fewer steps, small models, short sequences."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fast_attention import cli, data

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.md"
COMMANDS = [
    line
    for block in re.findall(r"```console\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.S)
    for line in block.strip().splitlines()
]
SHORTER = (
    (r"--minutes \S+|--steps \d+", "--steps 3"),
    (r"--seeds \d+", "--seeds 1"),
    (r"--lengths \d+", "--lengths 64"),
    (r"--tokens \d+", "--tokens 5"),
    (r"byte-lm", "'ByteLM(path=\"jargon.txt\", context=32)'"),
)


def test_every_command_of_the_tutorial_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("jargon.txt").write_text(data.text()[:20_000], encoding="utf-8")
    assert len(COMMANDS) == 9
    for line in COMMANDS:
        for pattern, shorter in SHORTER:
            line = re.sub(pattern, lambda _, shorter=shorter: shorter, line)
        if line.startswith("python "):
            program, target = line.removeprefix("python ").rsplit(" > ", 1)
            made = subprocess.run([sys.executable, *shlex.split(program)], capture_output=True, text=True, check=True)
            Path(target).write_text(made.stdout, encoding="utf-8")
            if target.endswith(".fasta"):
                assert [p.sequence for p in data.read_fasta(target)] == [p.sequence for p in data.proteins()]
            continue
        words = shlex.split(line)
        assert words[0] == "fast-attention"
        if words[1] in ("train", "study"):
            words += ["--width", "16", "--heads", "2", "--batch-size", "2"]
        with pytest.raises(SystemExit) as stop:
            cli.main(words[1:])
        said = capsys.readouterr()
        assert not stop.value.code, f"{line}: {said.err}"
    for made in (
        "compare/report.html",
        "protein/curve.svg",
        "study/study.html",
        "bytes/model/config.json",
        "labels/curve.svg",
    ):
        assert (Path("out") / made).is_file(), made
