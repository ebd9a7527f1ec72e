"""Pages of mechanisms: every one has its idea, its settings, its refusals, its picture, and the records' figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fast_attention import Attention, catalogue
from tests.docs.conftest import ROOT, Change

NAMES = catalogue.names()
Script = Callable[[str], ModuleType]
Pages = dict[Path, str]


def test_every_mechanism_has_an_idea_and_every_idea_a_mechanism(script: Script) -> None:
    writer = script("mechanism_pages")
    assert {path.stem for path in writer.IDEAS.iterdir()} == {*NAMES}
    for name in NAMES:
        text = (writer.IDEAS / f"{name}.md").read_text(encoding="utf-8")
        found = [*writer.sections(text)]
        assert found == [*writer.SECTIONS[: len(found)]], name
        assert len(found) >= 2, name
        assert all(len(body) > 80 for body in writer.sections(text).values()), name


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_what_a_reader_asks_for(name: str, pages: Pages, script: Script) -> None:
    page = pages[ROOT / "docs" / "mechanisms" / f"{name}.md"]
    mechanism: Any = catalogue.default(name)
    writer = script("mechanism_pages")
    headings = re.findall(r"^## (.+)", page, re.M)
    wanted = ["Idea", "Formula", "Pattern", "Settings", "What it cannot do", "Limits", "Measured", "Class"]
    assert [each for each in headings if each != "Known faults elsewhere"] == wanted
    for body in writer.sections((writer.IDEAS / f"{name}.md").read_text(encoding="utf-8")).values():
        assert body in page
    for field in fields(mechanism):
        row = re.search(rf"^\| `{field.name}` \| `(.*?)` \| (.+) \|$", page, re.M)
        assert row, field.name
        assert row[1] == repr(getattr(mechanism, field.name))
        assert len(row[2]) > 10, field.name
    assert mechanism.traits.formula in page
    for number in re.findall(r"arXiv ([\d.]+\d)", mechanism.traits.paper):
        assert f"https://arxiv.org/abs/{number})" in page
    assert re.search(rf"!\[[^\]]{{40,}}\]\({name}\.svg\)", page), "the picture has no alternative text"


@pytest.mark.parametrize("name", NAMES)
def test_what_it_cannot_do_is_what_the_error_says(name: str, script: Script) -> None:
    writer, mechanism = script("mechanism_pages"), catalogue.default(name)
    said = "\n".join(writer.refusals(mechanism))
    for trait, words in writer.DENIED.items():
        if isinstance(mechanism, Attention) and not getattr(mechanism.traits, trait):
            line = next(line for line in said.splitlines() if words in line)
            error = str(mechanism.refuse("this", trait))
            assert re.findall(r"\[`(\w+)`\]", line) == re.findall(r"(\w+)\(\)", error.partition("What would work:")[2])
        elif getattr(mechanism.traits, trait):
            assert words not in said
    for trait, words in writer.HELD.items():
        assert (words in said) == bool(getattr(mechanism.traits, trait))


def test_figures_are_those_of_the_records(script: Script, changed: Change) -> None:
    """A record that says something else makes another page: nothing is copied by hand."""
    writer = script("mechanism_pages")

    def slower(held: Any) -> None:
        for cell in held["cells"]:
            if (cell["mechanism"], cell["length"]) == ("Local()", 4096):
                cell.update(forward_ratio=1 / 7654.3, forward_ms=98.7)
        for row in held["weights"]:
            if (row["name"], row["length"]) == ("Local()", 4096):
                row.update(forward_bytes=4321 * 2**20)

    folder = changed("bench", slower)
    page, before = (text.replace(writer.NARROW, " ") for text in (writer.page("Local", folder), writer.page("Local")))
    for figure in ("7654x (98.7 ms)", "4,321.0 MiB"):
        assert figure in page
        assert figure not in before


def test_results_are_those_of_the_records(script: Script, changed: Change) -> None:
    writer = script("mechanism_pages")

    def better(held: Any) -> None:
        next(row for row in held["rows"] if row["mechanism"] == "BigBird()").update(sentence_cosine=0.12345)

    page = writer.page("BigBird", changed("costs", better))
    assert "| 0.123 |" in page
    assert "| 0.123 |" not in writer.page("BigBird")


def test_pictures_show_what_the_mechanism_weighs(script: Script) -> None:
    patterns = script("patterns")
    panels = dict(patterns.panels("Local")[0])
    at = torch.arange(patterns.TOKENS)
    seen = (at[:, None] - at[None]).abs() <= 6
    assert [*panels] == ["exact attention", "not causal", "causal"]
    assert not panels["not causal"][~seen].any()
    assert not panels["causal"].triu(1).any()
    for matrix in panels.values():
        assert torch.allclose(matrix.sum(-1), torch.ones(patterns.TOKENS), atol=1e-5)
    exact = panels["exact attention"]
    first, second = (list(each) for each in patterns.REPEATED)
    assert float(exact[second, first].mean()) > 3 * float(exact.mean()), "the passage that is said twice does not show"
    assert {catalogue.default(name).traits.matrix for name in NAMES} == {True, False}, "both ways of drawing are used"


def test_writing_leaves_what_is_fresh_and_removes_what_is_gone(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = script("mechanism_pages")
    monkeypatch.setattr(writer.catalogue, "names", lambda: ["Local", "FNet"])
    (tmp_path / "Gone.md").write_text("a mechanism that was renamed", encoding="utf-8")
    writer.write(tmp_path)
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {*made} == {"Local.md", "Local.svg", "FNet.md", "FNet.svg"}
    writer.write(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == made
