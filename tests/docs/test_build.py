"""What the builder makes: fresh, complete, its figures those of the records, without mechanisms that are gone."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fast_attention import Attention, catalogue
from fast_attention.lab import verdicts
from fast_attention.lab.advice import Advised
from fast_attention.lab.records import EXACT, Cell
from tests.docs.conftest import ROOT, Change
from tests.oracles import ORACLES

NAMES = catalogue.names()


def test_all_that_is_made_is_fresh(build: ModuleType) -> None:
    assert not build.stale(), "run `python docs/build.py`"


def test_what_is_stale_is_named(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        ROOT / "docs" / "costs.md": "another text",
        ROOT / "docs" / "times.svg": "<svg>\n</svg>",
        ROOT / "new.md": "",
    }
    monkeypatch.setattr(build, "generated", lambda: made)
    assert build.stale() == ["docs/costs.md", "docs/times.svg", "new.md"]


def test_a_page_names_only_parts_that_there_are(build: ModuleType) -> None:
    marks = {path: build.MARK.findall(path.read_text(encoding="utf-8")) for path in build.PAGES}
    assert {name for found in marks.values() for _, name, *_ in found} == {*build.PARTS}
    for path, found in marks.items():
        assert len(found) == path.read_text(encoding="utf-8").count("<!-- build: "), path


def test_no_line_that_is_made_is_raw_html(build: ModuleType) -> None:
    """A line that begins with a comment is no Markdown: code and links in it are not rendered."""
    for path in build.PAGES:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.lstrip("> ").startswith("<!--") or line.endswith("-->"), line
            assert not re.match(r"[> ]*<!--.*-->.*<!--", line), line


def test_records_are_read_by_todays_names(build: ModuleType) -> None:
    today, day = build.measured.today, "2026-11-24"
    assert today("LARA()", day) == today("Local(window=64) + ABC(num_slots=64)", day) == ""
    assert today("Local(windows=64)", day) == "", "a setting that there never was"
    for name in ("Softmax()", "Local(), projected, causal", "exact attention, causal", "original", "Local() + FNet()"):
        assert today(name, day) == name
    window = "Hybrid(near=Local(window=64)"
    for said, meant in (("Hybrid()", f"{window})"), ("Hybrid(first=4)", f"{window}, first=4)")):
        assert today(said, day) in (meant, ""), "the default of then was a window"
        assert today(said, "2026-12-01") == said
    assert today("Hybrid(near=BlockLocal())", day) == "Hybrid(near=BlockLocal())"


def test_rows_of_mechanisms_that_are_gone_are_passed_over(build: ModuleType, tmp_path: Path) -> None:
    path, rows = tmp_path / "2026-11-24-costs.json", [{"mechanism": name, "x": [[1]]} for name in ("ABC()", "FNet()")]
    held = {"meta": {}, "rows": rows, "by": {"Agent()": [1], "FNet()": [2]}, "conversion": {"mechanism": "LARA()"}}
    path.write_text(json.dumps(held), encoding="utf-8")
    assert build.measured.read(path).held == {"meta": {}, "rows": rows[1:], "by": {"FNet()": [2]}}


def test_every_number_of_the_tables_is_a_records(build: ModuleType, changed: Change) -> None:
    def slower(held: Any) -> None:
        for cell in held["cells"]:
            if (cell["mechanism"], cell["length"]) == ("Linformer()", 4096):
                cell["forward_ratio"] = 1 / 543.2

    before = build.lengths("4096"), build.page("Linformer")
    changed("bench", slower)
    assert build.measured.gain("Linformer()").startswith("543.2x at 4,096 tokens ([2026-")
    after = build.lengths("4096"), build.page("Linformer")
    assert ["543x" in text for text in (*before, *after)] == [False, False, True, True]


def test_results_are_the_records(build: ModuleType, changed: Change) -> None:
    def better(held: Any) -> None:
        next(row for row in held["rows"] if row["mechanism"] == "BigBird()").update(sentence_cosine=0.12345)

    assert "0.123" not in build.swapped() + build.page("BigBird")
    changed("costs", better)
    assert "| `BigBird()` | 0.123 (" in build.swapped()
    assert "| `BigBird()` | 0.123 | 1.000 |" in build.page("BigBird")
    assert build.measured.untrained("BigBird()").startswith("cosine 0.123 at")


def test_is_it_for_you_stands_once_and_is_linked() -> None:
    """Seven lines on the site's first page; every other page that chooses leads there."""
    first = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    table = first.partition("## Is it for you?\n")[2].partition("\n## ")[0]
    assert len([line for line in table.splitlines() if line.startswith("| ")]) == 1 + 7
    for name in ("README.md", "docs/choose.md", "docs/mechanisms.md", "docs/guides/index.md"):
        assert "index.md#is-it-for-you" in (ROOT / name).read_text(encoding="utf-8"), name


def test_one_decision_for_long_texts_stands_where_it_is_asked_for(build: ModuleType) -> None:
    """The page and the commands say the same; the figures below it are those of the newest record with chunks."""
    said = " ".join(verdicts.LONG)
    page = (ROOT / "docs" / "long.md").read_text(encoding="utf-8")
    assert page.replace("`", "").count(said) == 1
    for name in ("README.md", "docs/index.md", "docs/choose.md"):
        assert "long.md" in (ROOT / name).read_text(encoding="utf-8"), name
    far = Advised({"length": 4096, "budget": 0.1, "pass": "forward", "context": 512, "extension": "extended"})
    far.answer([])
    assert " ".join(far.advice["words"][1:]) == said
    far.cells = [Cell(EXACT, 4096, "measured", forward_ms=1.0, forward_ratio=1.0)]
    assert " ".join(verdicts.answer(far)[1:]) == said
    rows, _ = build.measured.retrieval()
    recall = {name: row["recall_at_1"] for name, row in rows.items()}
    nearest, mean = recall["best of the 512-token chunks, a vector each"], recall["mean of the 512-token chunks"]
    assert nearest >= max(recall.values()) - 0.01, "or the decision has to be made anew"
    assert recall["extended, exact"] < mean - 0.05, "or exact attention is a reference after all"
    for value in (nearest, mean, recall["extended, exact"]):
        assert f"{value:.3f}" in build.retrieved()


def test_gains_with_the_same_results_are_the_records(build: ModuleType, changed: Change) -> None:
    def faster(held: Any) -> None:
        for row in held["rows"]:
            if (row["case"], row["what"], row["length"]) == ("modernbert", "forward", 4096):
                row.update(times=432.1, difference=0.5)
        memory = {
            "case": "t5",
            "what": "peak memory",
            "length": 2048,
            "bytes": 2**30,
            "swapped_bytes": 2**28,
            "times": 4,
        }
        held["rows"] = [*(row for row in held["rows"] if row["what"] != "peak memory"), memory]
        held["meta"].update(hardware="Some(R) CPU Processor 7", threads=3, cores=8)

    assert "432x" not in build.same_results("4096")
    changed("whole-models", faster)
    lines = [line for line in build.same_results("1024", "4096").splitlines() if "432x" in line]
    assert [(line.split(" | ")[0], line.split(" | ")[-1]) for line in lines] == [("| ModernBERT", "5e-01 |")]
    assert "432x" not in build.same_results("gemma3", "1024", "4096")
    assert "| T5 encoder | peak memory | 2,048 | 1,024 MiB | 256 MiB | 4.0x |" in build.other_work()
    assert build.measured.processor("whole-models") == "Some 7, 3 of 8 cores"


def test_every_way_of_the_comparison_has_its_line(build: ModuleType, changed: Change) -> None:
    """Speeds over transformers', the worst of MiniLM's outputs, and what was too large to run."""

    def other(held: Any) -> None:
        for row in held["rows"]:
            if row["way"] == "swap(model)" and row["case"] == "minilm":
                row.update(tokens_per_second=77.7 * row["tokens"], cosine=0.3 if row["texts"] == "128 tokens" else 0.9)
            if row["way"] == "transformers, float32" and row["case"] == "minilm":
                row.update(tokens_per_second=1.0 * row["tokens"])
            if row["way"] == "ONNX Runtime, int8" and row["texts"] == "2,048 tokens":
                row.update(note="scores of all pairs would take up to 40 GiB")

    ways = {row["way"] for row in build.measured.newest("instead").held["rows"]}
    assert ways == {*build.INSTEAD}
    assert len(build.instead().splitlines()) == 2 + len(ways) + 2
    changed("instead", other)
    lines = {line.split(" | ")[0]: line for line in build.instead().splitlines()}
    assert lines["| `swap(model)`"].count("77.7x") == 2
    assert lines["| `swap(model)`"].endswith("| 0.300 |")
    assert "too large" in lines["| ONNX Runtime, int8"]


def test_recommendations_are_of_one_record(build: ModuleType, changed: Change) -> None:
    """Time and quality of three mechanisms and exact attention, at one length, from one record."""

    def other(held: Any) -> None:
        for row in held["results"]:
            if row["mechanism"] == "Softmax()":
                row.update(step_seconds=100.0)
            if row["mechanism"] == "WKV()":
                row.update(step_seconds=0.5, value=9.875)

    _, _, *rows, _, source = build.recommended().splitlines()
    assert len(rows) == 4
    (file,) = re.findall(r"\]\((records/[\w.-]+)\)", source)
    assert (ROOT / file).exists()
    assert f"context={build.measured.FAR}" in build.measured.newest("study-byte-lm-learned").meta["task"]
    changed("study-byte-lm-learned", other)
    assert "| `WKV()` | 200x | 9.88 |" in build.recommended()
    assert "| `Softmax()` | 1.0x | 3.73 |" in build.recommended()


def test_cosine_and_speed_in_a_row_are_of_one_length(build: ModuleType, changed: Change) -> None:
    """What a swap does to passages of 480 tokens stands beside the time of the nearest length, never of 4,096."""

    def at_4096(held: Any) -> None:
        for row in held["prices"]:
            if row["length"] != 512:
                row.update(seconds=row["seconds"] * (1000 if row["model"] == "original" else 1))

    before = build.swapped(), build.measured.untrained("BigBird()")
    changed("costs", at_4096)
    assert (build.swapped(), build.measured.untrained("BigBird()")) == before
    assert "of 512" in before[0]
    assert before[1].endswith("-costs.json))")
    record = build.measured.newest("convert-long")
    prices = {row["model"]: row["seconds"] for row in record.held["prices"] if row["length"] == 8192}
    judged = record.held["conversion"]["by_group"]["tuned"]["other text, 8192"]["sentence_cosine"]
    words = f"trained {judged:.3f}; the model {prices['original'] / prices['converted']:.1f}x, at 8,192 tokens"
    assert words in build.measured.converted("long")


def test_every_study_and_every_result_is_shown(build: ModuleType) -> None:
    table, pages = build.learned(), {name: build.figures(name) for name in NAMES}
    for record in build.measured.studies():
        assert table.count(record.link) == 1
        for expression, mean in build.measured.learned(record).items():
            if expression not in (build.measured.EXACT, build.measured.ALONE):
                name = re.findall(r"\w+", expression)[0]
                assert re.search(rf"\| `{re.escape(expression)}` \| {mean:.3f} \|.*{record.name}", pages[name])


def test_every_record_has_a_row_and_a_command(build: ModuleType) -> None:
    lines = [line for line in build.recorded().splitlines() if line.startswith("| [")]
    records = sorted(path.name for path in (ROOT / "records").glob("*.json"))
    assert sorted(re.findall(r"\(\./(\S+)\) \|", line)[0] for line in lines) == records
    for line in lines:
        for module in re.findall(r"python -m ([\w.]+)", line):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), line
        assert "fast-attention convert" in line or "python" in line or "make bench" in line


@pytest.mark.parametrize("name", NAMES)
def test_a_mechanisms_page_is_complete(name: str, build: ModuleType, pages: dict[Path, str]) -> None:
    page, mechanism = pages[build.MECHANISMS / f"{name}.md"], catalogue.default(name)
    headings = re.findall(r"^## (.+)$", page, re.M)
    sections = (
        "Idea",
        "Formula",
        "Pattern",
        "Settings",
        "What it cannot do",
        "Limits",
        "Measured",
        "In loops",
        "Class",
    )
    for heading in sections:
        assert headings.count(heading) == 1, heading
    assert f"def {ORACLES[name].__name__}(" in page
    (file,) = re.findall(r" File: `(\S+)`\.$", page, re.M)
    assert f"class {name}(" in (ROOT / file).read_text(encoding="utf-8")
    for field in fields(mechanism):
        default = re.escape(repr(getattr(mechanism, field.name)))
        assert re.search(rf"^\| `{field.name}` \| `{default}` \| .{{10,}} \|$", page, re.M), field.name
    assert mechanism.traits.formula in page
    for number in re.findall(r"arXiv ([\d.]+\d)", mechanism.traits.paper):
        assert f"https://arxiv.org/abs/{number})" in page
    assert re.search(rf"!\[[^\]]{{40,}}\]\({name}\.svg\)", page), "the picture has no alternative text"


@pytest.mark.parametrize("name", NAMES)
def test_what_it_cannot_do_is_what_the_error_says(name: str, build: ModuleType) -> None:
    mechanism = catalogue.default(name)
    said = build.refusals(mechanism)
    for trait, words in build.DENIED.items():
        if isinstance(mechanism, Attention) and not getattr(mechanism.traits, trait):
            line = next(line for line in said.splitlines() if words in line)
            error = str(mechanism.refuse("this", trait))
            assert re.findall(r"\[`(\w+)`\]", line) == re.findall(r"(\w+)\(\)", error.partition("What would work:")[2])
        elif getattr(mechanism.traits, trait):
            assert words not in said
    for trait, words in build.HELD.items():
        assert (words in said) == bool(getattr(mechanism.traits, trait))


def test_pictures_show_what_the_mechanism_weighs(build: ModuleType) -> None:
    pictures = build.pictures
    panels = dict(pictures.panels("Local")[0])
    at = torch.arange(pictures.TOKENS)
    seen = (at[:, None] - at[None]).abs() <= 6
    assert [*panels] == ["exact attention", "not causal", "causal"]
    assert not panels["not causal"][~seen].any()
    assert not panels["causal"].triu(1).any()
    for matrix in panels.values():
        assert torch.allclose(matrix.sum(-1), torch.ones(pictures.TOKENS), atol=1e-5)
    exact, (first, second) = panels["exact attention"], (list(each) for each in pictures.REPEATED)
    assert float(exact[second, first].mean()) > 3 * float(exact.mean()), "the passage that is said twice does not show"


def test_writing_leaves_what_is_fresh_and_removes_what_is_gone(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.catalogue, "names", lambda: ["Local", "FNet"])
    monkeypatch.setattr(build, "MECHANISMS", tmp_path)
    (tmp_path / "Gone.md").write_text("a mechanism that was renamed", encoding="utf-8")
    build.mechanism_pages()
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {*made} == {"Local.md", "Local.svg", "FNet.md", "FNet.svg"}
    build.mechanism_pages()
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == made


def test_a_source_is_a_short_link(build: ModuleType) -> None:
    """First authors and years, each with its own number; whatever has none stays in words."""
    for name in NAMES:
        paper = catalogue.default(name).traits.paper
        numbers, short = re.findall(r"arXiv ([\d.]+\d)", paper), build.source(paper)
        assert re.findall(r"arxiv\.org/abs/([\d.]+\d)\)", short) == numbers
        assert all(
            re.fullmatch(r"[A-Z][\w-]+ \d{4}|Jiang and Zuo", label) for label in re.findall(r"\[([^]]+)\]", short)
        )
    assert build.source("a book without a number") == "a book without a number"


def test_an_oracle_is_shown_with_what_it_calls(build: ModuleType) -> None:
    shown = build.loops("AFTSimple")
    assert 0 < shown.index("def _aft(") < shown.index("def simple(")
    for name in NAMES:
        code = build.loops(name).partition("```python\n")[2].removesuffix("```")
        defined = re.findall(r"^def (\w+)\(", code, re.M)
        assert len(defined) == len({*defined})
        assert defined[-1] == ORACLES[name].__name__
