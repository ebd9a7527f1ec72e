"""The pages of the four source texts: every equation has its call, every oracle that a page shows is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT

PAGES = sorted(path for path in (ROOT / "docs" / "papers").glob("*.md") if path.name != "index.md")
SHOWN = re.compile(r"^```\{literalinclude\} (\S+)\n:pyobject: (\w+)\n:language: python\n```$", re.M)


def test_there_are_four_and_the_index_links_them() -> None:
    index = (ROOT / "docs" / "papers" / "index.md").read_text(encoding="utf-8")
    assert len(PAGES) == 4
    for page in PAGES:
        assert f"]({page.name})" in index, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_equation_has_its_call_and_every_oracle_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings[:2] == ["Names", "Equations"]
    assert headings[2].startswith("The oracle")
    assert headings[3].startswith(("What the text leaves open", "What the notes leave open"))
    equations = text.partition("## Equations\n")[2].partition("\n## ")[0]
    _, *sections = re.split(r"^### ", equations, flags=re.M)
    assert len(sections) >= 3
    for section in sections:
        assert "```python\n" in section, f"{section.splitlines()[0]}: no call"
    assert equations.count("assert_close(") >= len(sections) - 1
    shown = SHOWN.findall(text)
    assert len(shown) == text.count("{literalinclude}") >= 2
    for path, name in shown:
        source = (page.parent / path).read_text(encoding="utf-8")
        assert name in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}, (path, name)


def test_every_number_of_fast_attention_is_on_its_page() -> None:
    text = (ROOT / "docs" / "papers" / "fast_attention.md").read_text(encoding="utf-8")
    table = text.partition("## Names\n")[2].partition("\n## ")[0]
    for number in (1, *range(5, 10), 11, 12):
        assert f"({number})" in table, number
    for number in (1, *range(7, 13)):
        assert f"\\tag{{{number}}}" in text, number
