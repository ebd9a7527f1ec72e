"""``fast-attention advise``: the ranking's rules on made-up numbers, and real runs on tiny inputs."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fast_attention import catalogue
from fast_attention.lab import advice, command_line
from fast_attention.lab.advice import ORDER, Advised, Question, answer, ranked
from fast_attention.lab.comparison import Comparison, Error
from fast_attention.lab.records import EXACT, Cell
from tests.lab.reading_pages import assert_one_file, values
from tests.lab.small_models import WORDS, saved

TINY = ["advise", "2x8", "--length", "24", "--threads", "1", "--seconds", "60"]


def record(ratios: dict[str, float], errors: dict[str, float], length: int = 512) -> Comparison:
    """Exact attention takes a second; the others their ratio; every head has the same error, at 512 tokens."""
    cells = [Cell(EXACT, length, "measured", forward_ms=1000.0, forward_ratio=1.0, forward_bytes=64)]
    cells += [Cell(name, length, "measured", forward_ms=1000 * r, forward_ratio=r) for name, r in ratios.items()]
    return Comparison({}, cells, [Error(name, 512, "Softmax", [[size]]) for name, size in errors.items()])


def parsed(*names: str) -> list[Any]:
    return [catalogue.parse(name) for name in names]


ALL = ("Local(window=2)", "Local(window=4)", "Local(window=8)", "FavorPlus()", "LogAttention()", "Linformer()", "LSH()")


def test_the_ranking() -> None:
    """Within the budget and faster; exact; accurate and slow; beyond the budget; unknown; impossible."""
    found = record(
        {
            "Local(window=2)": 0.5, "Local(window=4)": 0.25, "Local(window=8)": 2.0,
            "FavorPlus()": 0.1, "Linformer()": 0.2,
        },
        {"Local(window=2)": 0.05, "Local(window=4)": 0.09, "Local(window=8)": 0.01, "FavorPlus()": 0.5},
    )  # fmt: skip
    found.cells.append(Cell("LSH()", 512, "refused", "LSH() does not support it"))
    question = Question(512, 0.1)
    rows = ranked(found, parsed(*ALL), question)
    assert [(row.mechanism, row.kind) for row in rows] == [
        ("Local(window=4)", "use"), ("Local(window=2)", "use"), (EXACT, "exact"), ("Local(window=8)", "slower"),
        ("FavorPlus()", "inexact"), ("Linformer()", "unknown"), ("LogAttention()", "cannot"), ("LSH()", "cannot"),
    ]  # fmt: skip
    assert rows[-1].note == "refused: LSH() does not support it"
    assert rows[-2].note == "not reached"
    assert "train it" in rows[-3].note
    assert "be causal" in rows[-3].cannot
    assert [ORDER.index(row.kind) for row in rows] == sorted(ORDER.index(row.kind) for row in rows)
    said = answer(rows, question)
    assert said[0].startswith("At 512 tokens use Local(window=4): 4 times as fast as exact attention, median error 9 %")


@pytest.mark.parametrize(
    ("ratio", "error", "kind"),
    [
        (0.5, 0.1, "use"),
        (0.5, 0.1001, "inexact"),
        (0.94, 0.0, "use"),
        (0.96, 0.0, "slower"),
        (0.5, float("inf"), "inexact"),
    ],
)
def test_the_limits(ratio: float, error: float, kind: str) -> None:
    """The budget itself is allowed; a draw in time is no reason to give up exactness."""
    found = record({"FavorPlus()": ratio}, {"FavorPlus()": error})
    rows = {row.mechanism: row.kind for row in ranked(found, parsed("FavorPlus"), Question(512, 0.1))}
    assert rows["FavorPlus()"] == kind


def test_keep_exact_attention_where_nothing_accurate_is_faster() -> None:
    found = record(
        {"Local(window=2)": 4.0, "Local(window=4)": 3.0},
        {"Local(window=2)": 0.05, "Local(window=4)": 0.05},
    )
    rows = ranked(found, parsed("Local(window=2)", "Local(window=4)"), question := Question(512, 0.1))
    assert [row.mechanism for row in rows] == [EXACT, "Local(window=4)", "Local(window=2)"]
    assert answer(rows, question) == [
        "At 512 tokens keep exact attention: nothing within a median error of 10 % is faster.",
        "The nearest, Local(window=4), is 3 times as slow as exact attention; fast-attention compare measures greater "
        "lengths.",
    ]


def test_keep_exact_attention_where_nothing_is_accurate_enough() -> None:
    found = record({"FavorPlus()": 0.5, "Linformer()": 0.2}, {"FavorPlus()": 0.6})
    rows = ranked(found, parsed("FavorPlus", "Linformer"), question := Question(512, 0.1))
    said = answer(rows, question)
    assert rows[0].mechanism == EXACT
    assert said[0].endswith("nothing that needs no training stays within a median error of 10 %.")
    assert said[1] == "The nearest, FavorPlus(), has 60 % and is 2 times as fast as exact attention."
    assert said[2].endswith("no error is known: 1 more.")


def test_an_error_at_fewer_tokens_is_no_proof() -> None:
    """A window may cover all that the model reads, and little of what was asked for."""
    found = record({"Local(window=2)": 0.5}, {"Local(window=2)": 0.0}, 2048)
    rows = ranked(found, parsed("Local(window=2)"), question := Question(2048, 0.1))
    assert [row.kind for row in rows] == ["exact", "unproven"]
    said = answer(rows, question)
    assert said[0] == "At 2,048 tokens keep exact attention: no error is known there, as no more than 512 were read."
    assert said[1].startswith("Worth a look is Local(window=2): median error 0 % at 512 tokens, 2 times as fast")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_advice_on_shapes_is_measured_and_says_on_what(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mechanisms", "Local(window=99)", "Favor(num_features=8)", "AFTSimple", "FNet", "--json"]
    assert command_line.run([*TINY, *options]) == 0
    out, err = capsys.readouterr()
    assert "advice.html" in err
    found = json.loads(out)
    assert {*found} == {"schema", "advice", "ranking", "meta", "rows", "errors", "sha256"}
    assert found["advice"]["use"] == found["ranking"][0]["mechanism"]
    assert found["meta"]["quality"] == "Gaussian stand-ins"
    rows = {row["mechanism"]: row for row in found["ranking"]}
    assert {*rows} == {EXACT, "Local(window=99)", "Favor(num_features=8)", "AFTSimple()", "FNet()"}
    assert rows["Local(window=99)"]["median_error"] < 1e-6, "a window that covers everything"
    assert rows["Local(window=99)"]["kind"] in ("use", "slower")
    assert rows["Favor(num_features=8)"]["kind"] == "inexact"
    assert rows["Favor(num_features=8)"]["median_error"] > 0.1
    assert rows["AFTSimple()"]["kind"] == rows["FNet()"]["kind"] == "unknown"
    record, page = Advised.read(Path("out/advise/advice.json")), Path("out/advise/advice.html").read_text()
    assert record.to_json() == json.dumps(found, indent=1)
    assert_one_file(page)
    assert all(words in unescape(page) for words in record.advice["words"])
    for row in record.ranking:
        assert row.milliseconds
        assert row.milliseconds in values(page)
        assert row.peak_bytes
        assert f">{row.mechanism}<" in page


def test_advice_for_a_causal_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On its own tensors, with as many positions as it takes; what is not causal is refused and says so."""
    (tmp_path / "words.txt").write_text(WORDS)
    place = str(saved(tmp_path / "model", "GPT2Model"))
    asked = ["advise", place, "--length", "64", "--threads", "1", "--seconds", "20", "--text", "words.txt"]
    asked += ["--training", "--mechanisms", "Local(window=64)", "Linformer(rank=4)", "--batch", "2"]
    capsys.readouterr()
    assert command_line.run(asked) == 0
    shown, meta = capsys.readouterr().out, (record := Advised.read(Path("out/advise/advice.json"))).meta
    assert (meta["causal"], meta["batch"], meta["pass"]) == (True, 2, "training")
    longer = "learned positions extended from 48 tokens (copy), untrained"
    assert meta["error_tensors"] == {"64": f"the first 64 tokens of words.txt, {longer}"}
    last = record.ranking[-1]
    assert (last.mechanism, last.kind) == ("Linformer(rank=4)", "cannot")
    assert last.note.startswith("refused")
    for words in ("At 64 tokens", "Linformer(rank=4)", "backward, 2 x 4 heads of width 8, causal", "traits.causal is"):
        assert words in shown, words
    assert command_line.run([*asked, "--no-causal"]) == 2
    assert "the model is a decoder" in capsys.readouterr().err


def test_no_time_is_no_verdict() -> None:
    """What was not timed may be faster and exact: nothing is said of it."""
    timed = Cell(EXACT, 512, "measured", forward_ms=1.0, forward_ratio=1.0)
    found, question = Comparison({}, [timed, Cell("Local()", 512, "over budget", "late")]), Question(512, 0.1)
    assert answer(ranked(found, parsed("Local"), question), question) == [
        "At 512 tokens nothing but exact attention was timed: more --seconds may change that."
    ]
    found.cells.append(Cell("LSH()", 512, "measured", forward_ms=2.0, forward_ratio=2.0))
    found.errors.append(Error("LSH()", 512, "Softmax", [[0.5]]))
    said = answer(ranked(found, parsed("Local", "LSH"), question), question)
    assert said[-1] == "Not timed, for lack of --seconds: 1 more."
    assert said[0].startswith("At 512 tokens keep exact attention: of the 1 timed, nothing ")


def test_what_was_late_is_one_line() -> None:
    chosen = parsed("LogAttention", "FavorPlus", "Linformer")
    late = Advised({}, [Cell(repr(each), 16, "over budget", "late") for each in chosen])
    late.ranking = ranked(late, chosen, Question(16, 0.1))
    assert advice.unranked(late) == {"Not measured": [(", ".join(map(repr, chosen)), "over budget: late")]}
