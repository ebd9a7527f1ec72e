"""Completion in a shell: the script that it asks for, and what comes after the words on its line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer import rich_utils

from fast_attention.lab.command_line import COMMANDS, run

SHELLS = [name for name in ("bash", "zsh") if shutil.which(name)]
LIGHT = "import sys; sys.modules['torch'] = None\nfrom fast_attention.cli import main; main([])"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder for shells to be set up in, with the command on the path."""
    command = tmp_path / "bin" / "fast-attention"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m fast_attention "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZDOTDIR", raising=False)
    return tmp_path


def said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def completed(line: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What bash is offered at a line's end, where torch cannot be loaded: a shell does not wait for it."""
    monkeypatch.setenv("_FAST_ATTENTION_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    return {*said(sys.executable, "-c", LIGHT).split()}


@pytest.mark.skipif("bash" not in SHELLS, reason="there is no bash")
def test_bash_completes_by_the_script_that_is_shown(home: Path) -> None:
    script = home / "script"
    script.write_text(said("bash", "-c", "fast-attention --show-completion; true"))
    ask = "COMP_WORDS=(fast-attention co); COMP_CWORD=1; _fast_attention_completion fast-attention"
    assert said("bash", "-c", f"source {script}; {ask}; echo ${{COMPREPLY[@]}}").split() == ["compare", "convert"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_is_set_up_in_its_own_files(shell: str, home: Path) -> None:
    said(shell, "-c", "fast-attention --install-completion; true")
    read = (home / f".{shell}rc").read_text()
    place = {"bash": ".bash_completions/fast-attention.sh", "zsh": ".zfunc/_fast-attention"}[shell]
    assert str(Path(place).parent) in read
    assert "_FAST_ATTENTION_COMPLETE" in (home / place).read_text()


def test_commands_and_their_options_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("fast-attention ", monkeypatch) == {*COMMANDS}
    assert completed("fast-attention advise x --le", monkeypatch) == {"--length"}
    assert {"--mechanisms", "--lengths", "--out"} <= completed("fast-attention compare --", monkeypatch)


def test_zsh_is_offered_a_command_s_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_FAST_ATTENTION_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "fast-attention compare --mech")
    assert '"--mechanisms":' in said(sys.executable, "-c", LIGHT)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_whole_in_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 columns: no example ends in an ellipsis."""
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 80)
    assert run([command, "--help"]) == 0
    assert "\u2026" not in capsys.readouterr().out
