"""Texts: a user's file, and those of this machine: in the same order every time, bounded, of prose, nothing twice."""

from __future__ import annotations

import codecs
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fast_attention.lab import texts
from fast_attention.lab.inputs import InputError


def test_sources_are_prose_in_a_fixed_order_without_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "SOURCE_BYTES", 60_000)
    for source in (texts.python, texts.packages):
        read = source()
        assert read == source()
        assert 60_000 <= read.facts["bytes"] < 250_000
        paragraphs = [paragraph for _, text in read.documents for paragraph in text.split("\n\n")]
        assert len(paragraphs) == len({*paragraphs})
        assert "fast-attention" not in [document for document, _ in read.documents]
    assert len(texts.read().documents[0][1]) > 200_000, "the default, of any length"


def test_docstrings_are_read_once_the_topics_end(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""First."""\nclass A:\n    """Second."""\n    def f(self):\n        """Third."""\n'
    )
    (tmp_path / "test_b.py").write_text('"""Of a test."""\n')
    (tmp_path / "c.py").write_text("def :")
    assert [*texts._docstrings(tmp_path)] == [("a.py", "First.\n\nSecond.\n\nThird.")]


def test_tables_and_repeated_paragraphs_are_left_out() -> None:
    prose = "\n".join(f"sentence number {i} has quite a few words" for i in range(20))
    kept = texts._limited([("a", f"{prose}\n\nend"), ("table", "1.0 2.0\n" * 200), ("b", f"{prose}\n\nother")])
    assert kept == (("a", f"{prose}\n\nend"),)


WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b" \n", "the file is empty"),
    "latin": (lambda: b"one\ntwo\n\xe9", ", line 3: not UTF-8 text"),
    "cut gzip": (lambda: gzip.compress(b"words")[:-9], "cut off or damaged"),
    "wrong gzip": (lambda: b"\x1f\x8b" + b"x" * 30, "cut off or damaged"),
    "a bomb": (lambda: gzip.compress(bytes(300_000)), "more than 100,000 bytes"),
    "too long": (lambda: b"x" * 100_001, "more than 100,000 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_text_is_refused_by_name(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "FILE_BYTES", 100_000)
    content, said = WRONG[case]
    (path := tmp_path / "a.txt").write_bytes(content())
    with pytest.raises(InputError, match=f"^[^\n]*{path}[^\n]*{said}"):
        texts.read(str(path))


def test_what_a_text_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain or gzip, with a byte order mark as Windows writes it, and a pipe that a shell gives; no endless device."""
    for content in (b"words", codecs.BOM_UTF8 + b"words", gzip.compress(b"words")):
        (path := tmp_path / "a.txt").write_bytes(content)
        assert texts.read(str(path)).documents == (("a.txt", "words"),)
    reader, writer = os.pipe()
    os.write(writer, gzip.compress(b"words"))
    os.close(writer)
    assert texts.read(f"/dev/fd/{reader}").documents[0][1] == "words"
    os.close(reader)
    monkeypatch.setattr(texts, "FILE_BYTES", 100_000)
    with pytest.raises(InputError, match="more than 100,000 bytes"):
        texts.read("/dev/zero")
