"""The site: what its copy buttons copy, and what it says of what is cut off; read without a browser."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.conftest import ROOT

bs4, lexers = pytest.importorskip("bs4"), pytest.importorskip("pygments.lexers")
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.S | re.M)


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copied(code: str, language: str, exclude: str) -> str:
    """What the copy button of a block gives: its text without the elements that are left out."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter

    page = bs4.BeautifulSoup(highlight(code, lexers.get_lexer_by_name(language), HtmlFormatter()), "html.parser")
    for element in page.select(exclude):
        element.decompose()
    return page.get_text().strip("\n")


def pages() -> list[Path]:
    return [
        path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "auto_gallery", "auto_start"} & {*path.parts}
    ]


def test_every_block_of_the_site_can_be_copied(conf: ModuleType) -> None:
    """Commands without a prompt are what a lexer for consoles takes for output."""
    count = 0
    for path in pages():
        for _, language, code in FENCED.findall(path.read_text(encoding="utf-8")):
            if not language.startswith("{") and language != "math":  # directives and equations have no button
                assert copied(code, language or conf.highlight_language, conf.copybutton_exclude) == code.strip("\n"), (
                    path
                )
                count += 1
    assert count > 50
    command = "fast-attention list"
    assert copied(command, "console", conf.copybutton_exclude) == command
    assert copied(command, "console", ".linenos, .gp, .go") == "", "what this test is for"
    assert copied(f"$ {command}\nSoftmax\n", "console", conf.copybutton_exclude) == command
    assert copied(">>> 1 + 1\n2\n", "pycon", conf.copybutton_exclude) == "1 + 1"


def test_what_is_cut_off_says_so(conf: ModuleType) -> None:
    """Pictures and tables that are wider than the page get a sign; commands are wrapped."""
    script, style = ((ROOT / "docs" / "static" / f"site.{kind}").read_text("utf-8") for kind in ("js", "css"))
    assert "site.js" in conf.html_js_files
    assert "site.css" in conf.html_css_files
    scrolls = re.findall(r"^ *(article [^{]*)\{[^}]*overflow-x: auto", style, re.M)
    assert len(scrolls) == 3, "pictures, tables and code"
    for what in ('p > img[src$=".svg"]', ".table-wrapper", "pre"):
        assert what in script
    for language in {language for path in pages() for _, language, _ in FENCED.findall(path.read_text("utf-8"))}:
        if language in ("sh", "console", "bash", "text", ""):
            assert f"article .highlight-{language or conf.highlight_language} pre" in style, language
