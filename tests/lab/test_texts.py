"""Texts of this machine: several sources, in the same order every time, bounded, of prose, nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from fast_attention.lab import texts
from fast_attention.lab.inputs import InputError


def test_sources_are_prose_in_a_fixed_order_without_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "LIMIT", 60_000)
    for name in ("python", "packages"):
        read = texts.SOURCES[name]()
        assert read == texts.SOURCES[name]()
        assert 60_000 <= read.facts["bytes"] < 250_000
        paragraphs = [paragraph for _, text in read.documents for paragraph in text.split("\n\n")]
        assert len(paragraphs) == len({*paragraphs})
        assert "fast-attention" not in [document for document, _ in read.documents]
    assert texts.jargon().facts["documents"] == 1


def test_docstrings_are_read_once_the_topics_end(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""First."""\nclass A:\n    """Second."""\n    def f(self):\n        """Third."""\n'
    )
    (tmp_path / "test_b.py").write_text('"""Of a test."""\n')
    (tmp_path / "c.py").write_text("def :")
    assert [*texts._docstrings(tmp_path)] == [("a.py", "First.\n\nSecond.\n\nThird.")]


def test_tables_and_repeated_paragraphs_are_left_out() -> None:
    prose = "\n".join(f"sentence number {i} has quite a few words" for i in range(20))
    kept = texts._bounded([("a", f"{prose}\n\nend"), ("table", "1.0 2.0\n" * 200), ("b", f"{prose}\n\nother")])
    assert kept == (("a", f"{prose}\n\nend"),)


def test_every_source_but_the_judge_is_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(texts, "LIMIT", 20_000)
    monkeypatch.chdir(tmp_path)
    jargon, python, packages = (source() for source in texts.SOURCES.values())
    assert texts.read(None, None) == ([python, packages], jargon)
    assert texts.read(None, "python") == ([jargon, packages], python)
    assert texts.read(["jargon"], None) == ([jargon], python)
    assert texts.read(["jargon", "python"], "none") == ([jargon, python], None)
    Path("mine.txt").write_text("a text of my own")
    trained, judge = texts.read(["mine.txt", "python"], None)
    assert [each.name for each in trained] == ["mine.txt", python.name]
    assert judge == jargon
    Path("python").write_text("a file goes before a source of that name")
    assert texts.read(["python"], None)[0][0].documents[0][1].startswith("a file")
    with pytest.raises(InputError, match=r"--judge jargon: the same text as --text the Jargon File.* name another"):
        texts.read(["jargon"], "jargon")
    with pytest.raises(InputError, match=r"--judge none.txt"):
        texts.read(["jargon"], "none.txt")
