"""``fast-attention advise``: the ranking's rules on made-up numbers, and real runs on tiny inputs."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fast_attention import catalogue
from fast_attention.lab import commands, measure
from fast_attention.lab.advice import measuring, page
from fast_attention.lab.advice.measuring import Plan, investigate
from fast_attention.lab.advice.ranking import ORDER, Question, advice, ranked
from fast_attention.lab.advice.record import Advised
from fast_attention.lab.capture import Gaussian
from fast_attention.lab.comparison import Comparison, Error
from fast_attention.lab.measure import Setting
from fast_attention.lab.numbers import exactly
from fast_attention.lab.records import EXACT, Cell
from tests.lab.reading_pages import assert_one_file, pictures, values
from tests.lab.test_compare import CONFIGS, WORDS, reading, saved, setting

TINY = ["advise", "2x8", "--length", "24", "--threads", "1", "--seconds", "20"]


def record(
    ratios: dict[str, dict[int, float]], errors: dict[str, float], lengths: tuple[int, ...] = (512,)
) -> Comparison:
    """Exact attention takes a second; the others their ratio; every head has the same error."""
    cells = [Cell(EXACT, n, "measured", forward_ms=1000.0, forward_ratio=1.0, forward_bytes=64) for n in lengths]
    for name, found in ratios.items():
        cells += [Cell(name, n, "measured", forward_ms=1000 * r, forward_ratio=r) for n, r in found.items()]
    return Comparison({}, cells, [Error(name, 512, "Softmax", [[size]]) for name, size in errors.items()])


def parsed(*names: str) -> list[Any]:
    return [catalogue.parse(name) for name in names]


ALL = ("Local(window=2)", "Local(window=4)", "Local(window=8)", "FavorPlus()", "LogAttention()", "Linformer()", "LSH()")


def test_the_ranking() -> None:
    """Within the budget and faster; exact; accurate and slow; beyond the budget; unknown; impossible."""
    found = record(
        {
            "Local(window=2)": {512: 0.5}, "Local(window=4)": {512: 0.25}, "Local(window=8)": {512: 2.0},
            "FavorPlus()": {512: 0.1}, "Linformer()": {512: 0.2},
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
    said = advice(found, rows, question)
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
    found = record({"FavorPlus()": {512: ratio}}, {"FavorPlus()": error})
    rows = {row.mechanism: row.kind for row in ranked(found, parsed("FavorPlus"), Question(512, 0.1))}
    assert rows["FavorPlus()"] == kind


def test_keep_exact_attention_and_from_where_that_changes() -> None:
    lengths = (512, 1024, 2048)
    found = record(
        {"Local(window=2)": {512: 4.0, 1024: 2.0, 2048: 0.5}, "Local(window=4)": {512: 3.0, 1024: 2.5, 2048: 1.5}},
        {"Local(window=2)": 0.05, "Local(window=4)": 0.05},
        lengths,
    )
    question = Question(512, 0.1)
    rows = ranked(found, parsed("Local(window=4)", "Local(window=2)"), question)
    assert [row.mechanism for row in rows] == [EXACT, "Local(window=2)", "Local(window=4)"]
    assert rows[1].faster_from == pytest.approx(1024 * 2**0.5)
    assert rows[2].note == "not faster up to 2,048 tokens"
    said = advice(found, rows, question)
    assert said == [
        "At 512 tokens keep exact attention: nothing within a median error of 10 % is faster.",
        "Local(window=2) is faster from about 1,400 tokens on, where its error is not known.",
    ]
    known = Error("Local(window=2)", 2048, "Softmax", [[0.07]])
    found.errors.append(known)
    rows = ranked(found, parsed("Local(window=4)", "Local(window=2)"), question)
    assert rows[1].note == "faster from about 1,400 tokens on"
    assert rows[1].median_error == 0.05, "at the length asked for"
    known.output = [[0.3]]
    rows = ranked(found, parsed("Local(window=4)", "Local(window=2)"), question)
    assert {row.mechanism: row.note for row in rows}["Local(window=2)"] == (
        "no faster here, and too inexact at 2,048 tokens"
    )
    alone = ranked(found, parsed("Local(window=4)"), question)
    assert advice(found, alone, question)[1] == "Nor up to 2,048 tokens."


def test_keep_exact_attention_where_nothing_is_accurate_enough() -> None:
    found = record({"FavorPlus()": {512: 0.5}, "Linformer()": {512: 0.2}}, {"FavorPlus()": 0.6})
    rows = ranked(found, parsed("FavorPlus", "Linformer"), question := Question(512, 0.1))
    said = advice(found, rows, question)
    assert rows[0].mechanism == EXACT
    assert said[0].endswith("nothing that needs no training stays within a median error of 10 %.")
    assert said[1] == "The nearest, FavorPlus(), has 60 % and is 2 times as fast as exact attention."
    assert said[2].endswith("no error is known: 1 more.")


def test_what_a_transfer_brings_within_the_budget_is_ranked_so() -> None:
    found = record(
        {"Linformer()": {512: 0.2}, "LearnedFeatures()": {512: 0.3}, "FavorPlus()": {512: 0.5}}, {"FavorPlus()": 0.5}
    )
    found.meta |= {
        "transfer_minutes": 2.0,
        "transfer": {
            "LearnedFeatures()": {"before": 0.9, "after": 0.08, "length": 512},
            "FavorPlus()": {"before": 0.9, "after": 0.3, "length": 512},
            "Linformer()": {"before": 0.9, "after": 0.01, "length": 256},
        },
    }
    rows = ranked(found, parsed("Linformer", "FavorPlus", "LearnedFeatures"), question := Question(512, 0.1))
    kinds = {row.mechanism: row.kind for row in rows}
    assert [*kinds.values()] == ["trained", "exact", "inexact", "unknown"]
    assert kinds["Linformer()"] == "unknown", "transferred at fewer tokens than asked for"
    said = advice(found, rows, question)
    assert said[0].startswith("At 512 tokens use LearnedFeatures(), 3.3 times as fast as exact attention, after 2 min")
    assert "8 % (allowed 10 %)" in said[0]


def test_an_error_at_fewer_tokens_is_no_proof() -> None:
    """A window may cover all that the model reads, and little of what was asked for."""
    found = record({"Local(window=2)": {2048: 0.5}}, {"Local(window=2)": 0.0}, (2048,))
    rows = ranked(found, parsed("Local(window=2)"), question := Question(2048, 0.1))
    assert [row.kind for row in rows] == ["exact", "unproven"]
    said = advice(found, rows, question)
    assert said[0] == "At 2,048 tokens keep exact attention: no error is known there, as no more than 512 were read."
    assert said[1].startswith("Worth a look is Local(window=2): median error 0 % at 512 tokens, 2 times as fast")


def investigated(monkeypatch: pytest.MonkeyPatch, ratio: dict[int, float], seconds: float = 60.0) -> Comparison:
    """A real investigation, in which the times are given: the window is exact, as it covers everything."""

    def run(self: Any) -> None:
        for name in (each.name for each in self.competitors):
            time = 1.0 if name == EXACT else ratio[self.length]
            cell = Cell(name, self.length, "measured", forward_ms=time, forward_best_ms=time, forward_ratio=time)
            self.record.cells.append(cell)

    monkeypatch.setattr(measuring.TimingGroup, "run", run)
    found = Comparison({})
    plan = Plan(Gaussian(2, 8), parsed("Local(window=99)"), setting(2, 8), Question(16, 0.1), seconds)
    investigate(plan, found, lambda what: None)
    return found


def test_greater_lengths_are_tried_until_something_is_worth_using(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {16: 3.0, 32: 2.0, 64: 0.5, 128: 0.1}
    assert investigated(monkeypatch, times).meta["lengths"] == [16, 32, 64]
    assert investigated(monkeypatch, {16: 0.5}).meta["lengths"] == [16], "worth it at once"
    assert investigated(monkeypatch, dict.fromkeys(times, 3.0) | {16: 3e6}).meta["lengths"] == [16], "no time for more"
    monkeypatch.setattr(measure, "memory_at_hand", lambda device: 0)
    assert investigated(monkeypatch, times).meta["lengths"] == [16], "no memory for more"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_advice_on_shapes_is_measured_and_says_on_what(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mechanisms", "Local(window=99)", "Favor(num_features=8)", "AFTSimple", "FNet", "--json"]
    assert commands.run([*TINY, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {*found} == {"schema", "advice", "ranking", "meta", "rows", "errors", "sha256"}
    assert found["advice"]["use"] == found["ranking"][0]["mechanism"]
    assert found["advice"]["measured_up_to"] >= 24
    assert found["meta"]["quality"] == "Gaussian stand-ins"
    rows = {row["mechanism"]: row for row in found["ranking"]}
    assert {*rows} == {EXACT, "Local(window=99)", "Favor(num_features=8)", "AFTSimple()", "FNet()"}
    assert rows["Local(window=99)"]["median_error"] < 1e-6, "a window that covers everything"
    assert rows["Local(window=99)"]["kind"] in ("use", "slower")
    assert rows["Favor(num_features=8)"]["kind"] == "inexact"
    assert rows["Favor(num_features=8)"]["median_error"] > 0.1
    assert rows["AFTSimple()"]["kind"] == rows["FNet()"]["kind"] == "unknown"
    for row in rows.values():
        assert row["milliseconds"] > 0
        assert row["peak_bytes"] > 0
        assert isinstance(row["cannot"], list)
    assert Advised.read(Path("out/advise/advice.json")).to_json() == json.dumps(found, indent=1)


def test_the_page_says_the_records_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mechanisms", "Local(window=99)", "Favor(num_features=8)", "FNet", "--out", str(tmp_path / "here")]
    assert commands.run([*TINY, *options]) == 0
    assert "advice.html" in capsys.readouterr().err
    record = Advised.read(tmp_path / "here" / "advice.json")
    html = (tmp_path / "here" / "advice.html").read_text()
    assert_one_file(html)
    assert all(words in unescape(html) for words in record.advice["words"])
    (points,) = pictures(html)
    shown = {row.mechanism for row in record.ranking if row.median_error is not None}
    assert len(points) == len(shown) == 3, "FNet has no error to show"
    for row in record.ranking:
        assert row.milliseconds in values(html)
        assert f">{row.mechanism}<" in html
        if row.mechanism in shown:
            speed, error = exactly(1 / (row.ratio or 1.0)), exactly(100 * (row.median_error or 0.0))
            assert f"{row.mechanism}: {speed} times the speed, median error {error} %" in points
            assert row.median_error in values(html)


def test_advice_for_a_causal_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On its own tensors, with as many positions as it takes; what is not causal is refused and says so."""
    place = saved(tmp_path / "model", CONFIGS["gpt2"])
    (tmp_path / "words.txt").write_text(WORDS)
    options = [
        "--length",
        "64",
        "--threads",
        "1",
        "--seconds",
        "10",
        "--text",
        str(tmp_path / "words.txt"),
        "--training",
    ]
    capsys.readouterr()
    chosen = ["--mechanisms", "Local(window=64)", "Linformer(rank=4)", "--batch", "2"]
    assert commands.run(["advise", place, *options, *chosen, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    meta = found["meta"]
    assert (meta["causal"], meta["batch"], meta["pass"]) == (True, 2, "training")
    longer = "learned positions extended from 48 tokens (copy), untrained"
    assert meta["error_tensors"] == {"64": f"the first 64 tokens of words.txt, {longer}"}
    last = found["ranking"][-1]
    assert (last["mechanism"], last["kind"]) == ("Linformer(rank=4)", "cannot")
    assert "refused" in last["note"]
    assert "traits.causal" in last["note"]
    assert commands.run(["advise", place, *options, *chosen]) == 0
    told = capsys.readouterr().out
    for words in (
        "At 64 tokens",
        "Linformer(rank=4)",
        "forward and backward, 2 x 4 heads of width 8, causal",
        "traits.causal is False",
    ):
        assert words in told, words
    assert commands.run(["advise", place, *options, "--no-causal"]) == 2
    assert "the model is a decoder" in capsys.readouterr().err


def test_a_transfer_lowers_the_layers_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is fast, whatever this machine says is fast."""
    from fast_attention.lab.advice.transferring import candidates, transfer
    from fast_attention.lab.capture import HuggingFace

    place = saved(tmp_path / "model", CONFIGS["bert"])
    names = parsed("LearnedFeatures(num_features=8)", "FNet", "Local(window=2)", "AFTSimple")
    times = {repr(name): {32: 0.5} for name in names}
    found = record(times, {"Local(window=2)": 0.6}, (32,))
    found.errors[0].length = 32
    found.meta["seed"] = 0
    chosen = candidates(ranked(found, names, Question(32, 0.1)))
    assert chosen == [names[2], names[0], names[3]], "the inexact first; no mixers"
    source = HuggingFace(place, reading(" ".join([WORDS] * 5)))
    transfer(source, chosen[:2], 32, 0.05, found, lambda what: None)
    assert {*found.meta["transfer"]} == {"Local(window=2)", "LearnedFeatures(num_features=8)"}
    for tried in found.meta["transfer"].values():
        assert tried["after"] < tried["before"], tried
        assert tried["length"] == 32


BAD = {
    "no shapes": (["advise", "0x64"], "HEADSxWIDTH"),
    "no model": (["advise", "."], "holds no config.json"),
    "no model, but shapes": (["advise", "."], "heads and their width, such as 8x64"),
    "a file of weights": (["advise", __file__], "is a file; give a folder of transformers"),
    "help of its own": (["advise", "--frob"], "(see fast-attention advise --help)"),
    "shapes read nothing": (["advise", "8x64", "--text", "a"], "reads nothing"),
    "mechanism": ([*TINY, "--mechanisms", "FavorPlos"], "Did you mean FavorPlus"),
    "length": (["advise", "8x64", "--length", "0"], "--length"),
    "transfer of shapes": ([*TINY, "--transfer-minutes", "1"], "trains a Hugging Face model"),
    "budget": ([*TINY, "--budget", "-1"], "--budget"),
    "device": ([*TINY, "--device", "abacus"], "there is: cpu"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    given, said = BAD[case]
    assert commands.run(given) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert not told.out
    assert len(told.err.strip().splitlines()) == 1


def test_no_time_for_errors_is_said() -> None:
    found = Comparison({})
    plan = Plan(Gaussian(2, 8), parsed("Local(window=4)"), Setting(**vars(setting(2, 8))), Question(16, 0.1), 0.0)
    investigate(plan, found, lambda what: None)
    row = next(row for row in ranked(found, plan.mechanisms, plan.question) if row.mechanism != EXACT)
    assert row.kind in ("unknown", "cannot")
    assert "over budget" in row.note or "the time for errors was spent" in row.note


def test_the_accurate_are_timed_first_and_what_was_late_is_one_line() -> None:
    """Where the time ends early, what it went to are the mechanisms that may be the answer."""
    found = Comparison({})
    names = ("LogAttention", "FavorPlus", "Linformer", "Local(window=16)", "BlockLocal")
    plan = Plan(Gaussian(2, 8), parsed(*names), Setting(**vars(setting(2, 8))), Question(16, 0.1), 60.0)
    investigate(plan, found, lambda what: None)
    assert [error.mechanism for error in found.errors if error.length == 16][-1] == "FavorPlus()"
    timed = list(dict.fromkeys(cell.mechanism for cell in found.cells if cell.length == 16))
    assert timed[1:3] == ["Local(window=16)", "BlockLocal()"]
    assert timed[-2:] == ["LogAttention()", "Linformer()"]
    late = Advised({}, [Cell(each, 16, "over budget", "late") for each in timed[1:]])
    late.ranking = ranked(late, plan.mechanisms, plan.question)
    assert page.unranked(late) == {"Not measured": [(", ".join(map(repr, plan.mechanisms)), "over budget: late")]}
