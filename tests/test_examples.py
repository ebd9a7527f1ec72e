"""Every script in examples/ runs by itself, says something, is under 60 lines, needs torch and us only (one: Ray)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 3


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_runs(script: Path) -> None:
    if script.stem == "ray_train":
        pytest.importorskip("ray", reason="examples/ray_train.py needs ray: make test-ray")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2, "an example says what it found"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_is_short_and_self_contained(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) < 60
    assert "assert " in text
    roots = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").split(".")[0])
    peer = {"ray"} if script.stem == "ray_train" else set()
    assert roots - set(sys.stdlib_module_names) <= {"torch", "fast_attention"} | peer
