"""The page to choose by: fresh, its figures those of the records, its mechanisms ones that exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fast_attention import catalogue
from tests.docs.conftest import ROOT, Change

Script = Callable[[str], ModuleType]


def test_the_page_is_fresh(script: Script) -> None:
    assert not script("choose").stale(), "run `python docs/choose.py`: newer records"


def test_what_it_recommends_exists(script: Script) -> None:
    for need in script("choose").NEEDS:
        for part in need.take.split(" + "):
            assert catalogue.parse(part)
        assert (ROOT / "docs" / "guides" / f"{need.read}.md").resolve().exists()


def test_it_names_what_was_built_for_a_need(script: Script) -> None:
    said = script("choose").needs()
    for words in (
        "`Selected()`", "`Local2d(", "`BlockLocal2d(", "bias=ALiBi()", "bias=T5Buckets()", "`WKV()`", "`CosFormer()`",
        "`Nystrom()`", "`LogLinearAttention()`", "sinks=True", "batch_invariant", "`Softmax()`",
    ):  # fmt: skip
        assert words in said, words


def test_every_number_of_the_tables_is_a_records(script: Script, changed: Change) -> None:
    """Each record that is named is changed in turn, and the table with it."""
    choose = script("choose")

    def slower(held: Any) -> None:
        for cell in held["cells"]:
            if (cell["mechanism"], cell["length"]) == ("Linformer()", 4096):
                cell["forward_ratio"] = 1 / 543.2

    folder = changed("bench", slower)
    for table, figure in ((choose.needs, "543.2x"), (choose.lengths, "543x")):
        assert figure in table(folder)
        assert figure not in table()
    assert choose.page(folder) != choose.page()


def test_results_are_the_records(script: Script, changed: Change) -> None:
    choose = script("choose")

    def better(held: Any) -> None:
        for row in held["results"]:
            if row["mechanism"] == "Local(window=64)":
                row["value"] = 0.4242

    folder = changed("study-byte-lm", better)
    assert "0.42 bits per byte" in choose.needs(folder)
    row, _ = (
        line for line in choose.TABLES["learned"](folder).split("\n") if line.startswith("| [`Local(window=64)`](")
    )
    assert "| 0.424 (3) |" in row
    assert "0.424" not in choose.TABLES["learned"]()


def test_every_study_stands_in_one_table(script: Script) -> None:
    choose, measured = script("choose"), script("measured")
    for record in measured.newest_studies(measured.RECORDS):
        tables = [choose.TABLES[name]() for name in ("quality", "learned")]
        assert [f"records/{record.name})" in table for table in tables].count(True) == 1, record.name
        (table,) = (table for table in tables if f"records/{record.name})" in table)
        assert all(f"{mean:.3f}" in table for mean in measured.study_means(record).values()), record.name


def test_pictures_are_drawn_from_the_records_they_name(script: Script) -> None:
    pictures = script("choose_pictures")
    for path, picture in pictures.drawn().items():
        text = path.read_text(encoding="utf-8")
        assert all(f"records/{record.name}" in text for record in picture.records)
        assert len(re.findall(r'aria-label="([^"]{60,})"', text)) == 1, path
    (bench,) = pictures.drawn()[pictures.LENGTHS].records
    gain = max(cell["forward_ratio"] ** -1 for cell in bench.held["cells"] if cell["mechanism"] == "AFTSimple()")
    assert f">{gain:.0f}</text>" in pictures.LENGTHS.read_text(encoding="utf-8")
