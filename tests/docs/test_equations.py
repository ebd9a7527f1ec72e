"""Equations are MathML in the pages themselves: nothing is left as LaTeX, and no script is loaded to show them."""

from __future__ import annotations

import re
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.docs.conftest import ROOT
from tests.docs.test_site import conf

pytest.importorskip("latex2mathml")
EQUATION = re.compile(r"```math\n(.*?)\n```|\$([^$\n]+)\$", re.S)


@pytest.fixture(scope="module")
def equations(conf: ModuleType) -> ModuleType:
    """Sphinx's extension of the site, as its settings name it; ``conf`` puts the folder on the path."""
    import importlib

    assert conf.html_math_renderer == "mathml"
    assert "equations" in conf.extensions
    return importlib.import_module("equations")


def test_every_equation_of_the_papers_is_mathml(equations: ModuleType) -> None:
    count = 0
    for path in (ROOT / "docs" / "papers").glob("*.md"):
        text = re.sub(r"```python\n.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
        for block, inline in EQUATION.findall(text):
            latex = re.sub(r"\\tag\{\w+\}", "", block or inline)
            tree = ElementTree.fromstring(equations.mathml(latex, "block" if block else "inline"))
            assert tree.tag.endswith("}math"), path
            count += 1
    assert count > 100


def test_what_browsers_ignore_is_not_asked_of_them(equations: ModuleType) -> None:
    assert "<mi>\U0001d400</mi>" in equations.mathml(r"\mathbf A", "inline")
    assert "<mn>\U0001d7cf</mn>" in equations.mathml(r"\mathbf 1", "inline")
    assert "<mi>\u211d</mi>" in equations.mathml(r"\mathbb R", "inline")
    assert '<mtext class="prime">\u2032</mtext>' in equations.mathml("t'", "inline")
    assert equations.mathml(r"\begin{gathered} a \\ b \end{gathered}", "block").count("<mtr>") == 2
    with pytest.raises(ValueError, match=r"no MathML for .*nosuch"):
        equations.mathml(r"\nosuch{x}", "inline")


__all__ = ["conf"]
