"""Every relative link of a page leads to a file, and every anchor to a heading of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from fast_attention import catalogue
from tests.docs.conftest import ROOT

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^( *)(`{3,})[^{\n]*\n.*?^\1\2`*$", re.S | re.M)
INCLUDE = re.compile(r"^```\{(?:include|literalinclude)\} (\S+)", re.M)
DOCS = ROOT / "docs"
BUILT = {"_build", "mechanisms", "auto_gallery", "auto_start"}  # folders that a build makes


def sources() -> list[Path]:
    """The pages that people read, but not those that a build makes."""
    docs = [path for path in DOCS.rglob("*.md") if not BUILT & {*path.relative_to(DOCS).parts}]
    return [
        ROOT / name for name in ("README.md", "CHARTER.md", "CONTRIBUTING.md", "CHANGELOG.md", "records/README.md")
    ] + docs


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", text)


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and myst make them; a repeated one gets a number."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)", prose(text), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def built(file: Path) -> bool:
    """Whether a build makes this file, a mechanism's picture."""
    return file.parent == DOCS / "mechanisms" and file.suffix == ".svg" and file.stem in catalogue.names()


def broken(path: Path, text: str, pages: dict[Path, str]) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for link in LINK.findall(prose(text)) + INCLUDE.findall(text):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / target).resolve() if target else path
        if not (file in pages or built(file) or file.exists()):
            wrong.append(link)
        elif anchor:
            held = pages[file] if file in pages else file.read_text(encoding="utf-8")
            wrong += [link] if anchor not in slugs(held) else []
    return wrong


def test_every_relative_link_leads_somewhere(pages: dict[Path, str]) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sources()} | pages
    wrong = {str(path.relative_to(ROOT)): found for path, text in texts.items() if (found := broken(path, text, pages))}
    assert not wrong
    assert sum(len(LINK.findall(prose(text))) for text in texts.values()) > 500


def test_a_wrong_link_is_seen() -> None:
    page = ROOT / "docs" / "page.md"
    text = "[a](index.md) [b](index.md#is-it-for-you) [c](nowhere.md) [d](index.md#nowhere) [e](https://x.org)"
    text += " ![f](no.svg)"
    assert broken(page, text, {}) == ["nowhere.md", "index.md#nowhere", "no.svg"]
    assert broken(page, "```{include} ../NOTHING.md\n```", {}) == ["../NOTHING.md"]
    assert broken(page, "```\n[c](nowhere.md)\n```", {}) == []
