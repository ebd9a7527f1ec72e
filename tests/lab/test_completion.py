"""Shell completion: what bash and zsh are told for the start of a command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fast_attention.lab.command_line import COMMANDS

RUN = [sys.executable, "-m", "fast_attention"]


def told(tmp_path: Path, *arguments: str, **variables: str) -> str:
    """What the command prints with these variables of the environment, in a home of its own."""
    held = {**os.environ, "HOME": str(tmp_path), **variables}
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, check=True, env=held).stdout


def bash(tmp_path: Path, line: str) -> list[str]:
    """The words that bash is offered for the last word of a line."""
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_FAST_ATTENTION_COMPLETE": "complete_bash"}
    return told(tmp_path, **variables).split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fast-attention com", ["compare"]),
        ("fast-attention t", ["train", "tasks"]),
        ("fast-attention compare --mod", ["--model"]),
        ("fast-attention convert --keep", ["--keep-layers"]),
    ],
)
def test_bash_is_offered_commands_and_their_options(line: str, offered: list[str], tmp_path: Path) -> None:
    assert bash(tmp_path, line) == offered


def test_every_command_is_offered(tmp_path: Path) -> None:
    assert {*bash(tmp_path, "fast-attention ")} == {*COMMANDS}


def test_zsh_is_told_what_an_option_does(tmp_path: Path) -> None:
    variables = {"_TYPER_COMPLETE_ARGS": "fast-attention compare --model", "_FAST_ATTENTION_COMPLETE": "complete_zsh"}
    assert '"--model":' in told(tmp_path, **variables)


def test_the_script_that_is_installed_asks_for_this_command(tmp_path: Path) -> None:
    variables = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # as where no shell can be recognised
    shown = told(tmp_path, "--show-completion", "bash", **variables)
    assert "complete -o default -F _fast_attention_completion fast-attention" in shown
    told(tmp_path, "--install-completion", "bash", **variables)
    assert (tmp_path / ".bash_completions" / "fast-attention.sh").read_text(encoding="utf-8").strip() == shown.strip()
    assert "fast-attention.sh" in (tmp_path / ".bashrc").read_text(encoding="utf-8")
