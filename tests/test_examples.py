"""Every script in examples/ runs by itself, says something, is under 60 lines, needs torch and us only (one: Ray)."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import types
from pathlib import Path

import pytest

from fast_attention import cli
from tests.fresh import NEEDED, TORCH, told

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert len(SCRIPTS) >= 3


RUN = """
import contextlib, io, runpy, sys, warnings
warnings.simplefilter("error", UserWarning)
sys.argv = [{script!r}]
with contextlib.redirect_stdout(io.StringIO()) as said, torch.enable_grad():
    runpy.run_path({script!r}, run_name="__main__")
assert len(said.getvalue().splitlines()) >= 2, "an example says what it found"
"""


@NEEDED
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_runs(script: Path, tmp_path: Path) -> None:
    if script.stem == "ray_train":
        pytest.importorskip("ray", reason="examples/ray_train.py needs ray: make test-ray")
    assert told([(script.stem, str(tmp_path), RUN.format(script=str(script)))], TORCH) == {script.stem: ""}


def test_a_command_checks_the_mechanism_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/guides/your_mechanism.md: what it says of laws that break is true of its file."""
    page = (ROOT / "docs" / "guides" / "your_mechanism.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^fast-attention check .*$", page, re.M)
    monkeypatch.chdir(SCRIPTS[0].parent)
    for without, broken in (
        ("", []),
        ("    @in_float32\n", ["low precision", "autocast"]),
        (", export=False", ["torch.export, dynamic length"]),
    ):
        source = Path("top_keys.py").read_text(encoding="utf-8")
        assert source.count(without) == 1 or not without
        module = types.ModuleType("top_keys")
        monkeypatch.setitem(sys.modules, "top_keys", module)
        exec(source.replace(without, "") if without else source, module.__dict__)
        with pytest.raises(SystemExit) as stop:
            cli.main(shlex.split(line)[1:])
        said = capsys.readouterr().out
        assert bool(stop.value.code) == bool(broken), said
        assert [row.split("  ")[0] for row in said.splitlines() if " broken " in row] == broken


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
