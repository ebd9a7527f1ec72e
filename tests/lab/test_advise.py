"""``fast-attention advise``: the ranking's rules on made-up numbers, and real runs on tiny inputs."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention import catalogue
from fast_attention.lab import advice, command_line, compare, measure
from fast_attention.lab.advice import ORDER, Advised
from fast_attention.lab.capture import Gaussian
from fast_attention.lab.compare import Scene
from fast_attention.lab.measure import Competitor, Passes, Setting
from fast_attention.lab.records import EXACT, Cell, Error
from fast_attention.lab.verdicts import LONG, Verdict
from tests.lab.reading_pages import assert_one_file, values
from tests.lab.small_models import WORDS, saved

TINY = ["advise", "2x8", "--length", "24", "--threads", "1", "--seconds", "60"]


def record(ratios: dict[str, float], errors: dict[str, float], length: int = 512) -> Advised:
    """Exact attention takes a second; the others their ratio; every head has the same error, at 512 tokens."""
    cells = [Cell(EXACT, length, "measured", forward_ms=1000.0, forward_ratio=1.0, forward_bytes=64)]
    cells += [Cell(name, length, "measured", forward_ms=1000 * r, forward_ratio=r) for name, r in ratios.items()]
    meta = {"length": length, "budget": 0.1, "pass": "forward"}
    return Advised(meta, cells, [Error(name, 512, "Softmax", [[size]]) for name, size in errors.items()])


def ranked(found: Advised, mechanisms: list[Any]) -> list[Verdict]:
    found.answer(mechanisms)
    return found.ranking


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
    rows = ranked(found, parsed(*ALL))
    assert [(row.mechanism, row.kind) for row in rows] == [
        ("Local(window=4)", "use"), ("Local(window=2)", "use"), (EXACT, "exact"), ("Local(window=8)", "slower"),
        ("FavorPlus()", "inexact"), ("Linformer()", "unknown"), ("LogAttention()", "cannot"), ("LSH()", "cannot"),
    ]  # fmt: skip
    assert rows[-1].note == "refused: LSH() does not support it"
    assert rows[-2].note == "not reached"
    assert "train it" in rows[-3].note
    assert "be causal" in rows[-3].cannot
    assert [ORDER.index(row.kind) for row in rows] == sorted(ORDER.index(row.kind) for row in rows)
    said = found.advice["words"]
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
    rows = {row.mechanism: row.kind for row in ranked(found, parsed("FavorPlus"))}
    assert rows["FavorPlus()"] == kind
    found.cells[1].forward_low, found.cells[1].forward_high = 0.4, 1.1
    (row,) = (row for row in ranked(found, parsed("FavorPlus")) if row.mechanism != EXACT)
    assert row.kind == ("inexact" if kind == "inexact" else "slower"), "rounds on both sides of exact attention's time"


def test_keep_exact_attention_where_nothing_accurate_is_faster() -> None:
    found = record(
        {"Local(window=2)": 4.0, "Local(window=4)": 3.0},
        {"Local(window=2)": 0.05, "Local(window=4)": 0.05},
    )
    rows = ranked(found, parsed("Local(window=2)", "Local(window=4)"))
    assert [row.mechanism for row in rows] == [EXACT, "Local(window=4)", "Local(window=2)"]
    assert found.advice["words"] == [
        "At 512 tokens keep exact attention: nothing within a median error of 10 % is faster.",
        "The nearest, Local(window=4), is 3 times as slow as exact attention; fast-attention compare measures greater "
        "lengths.",
    ]


def test_keep_exact_attention_where_nothing_is_accurate_enough() -> None:
    found = record({"FavorPlus()": 0.5, "Linformer()": 0.2}, {"FavorPlus()": 0.6})
    rows = ranked(found, parsed("FavorPlus", "Linformer"))
    said = found.advice["words"]
    assert rows[0].mechanism == EXACT
    assert said[0].endswith("nothing that needs no training stays within a median error of 10 %.")
    assert said[1] == "The nearest, FavorPlus(), has 60 % and is 2 times as fast as exact attention."
    assert said[2].endswith("no error is known: 1 more.")


def test_an_error_at_fewer_tokens_is_no_proof() -> None:
    """A window may cover all that the model reads, and little of what was asked for."""
    found = record({"Local(window=2)": 0.5}, {"Local(window=2)": 0.0}, 2048)
    rows = ranked(found, parsed("Local(window=2)"))
    assert [row.kind for row in rows] == ["exact", "unproven"]
    said = found.advice["words"]
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
    for words in (
        "at 64 tokens is no reference",
        "Linformer(rank=4)",
        "backward, 2 x 4 heads of width 8, causal",
        "traits.causal is",
    ):
        assert words in shown, words
    assert command_line.run([*asked, "--no-causal"]) == 2
    assert "the model is a decoder" in capsys.readouterr().err


def test_no_time_is_no_verdict() -> None:
    """What was not timed may be faster and exact: nothing is said of it."""
    late = Cell("Local()", 512, "over budget", "late")
    found = record({"BlockLocal()": 0.5}, {"BlockLocal()": 0.09})
    found.cells.append(late)
    found.meta["would_do"] = 250
    both = parsed("BlockLocal", "Local")
    for known in ([], [[0.1]]):
        found.errors[1:] = [Error("Local()", 512, "Softmax", known, note="" if known else "over budget: late")]
        rows = ranked(found, both)
        assert [row.kind for row in rows] == ["use", "exact", "open"]
        assert found.advice["words"] == [
            "At 512 tokens undecided: give --seconds 250.",
            "May be the answer, and not measured yet: Local().",
            "So far BlockLocal() is best: 2 times as fast as exact attention, median error 9 %.",
        ]
    late.status, late.forward_ratio, found.errors[1] = (
        "measured",
        0.5,
        Error("Local()", 512, "Softmax", note="over budget"),
    )
    assert [row.kind for row in ranked(found, both)] == ["use", "exact", "open"], "fast, of unknown error"
    for changed in ({"status": "failed"}, {"status": "refused"}, {"status": "too large"}, {"forward_ratio": 2.0}):
        vars(late).update({"status": "over budget", "forward_ratio": None} | changed)
        assert ranked(found, both)[-1].kind in ("cannot", "unknown"), "no time would help"
    late.status, late.forward_ratio, found.errors[1] = "over budget", None, Error("Local()", 512, "Softmax", [[0.11]])
    ranked(found, [*both, *parsed("AFTSimple")])
    said = found.advice["words"]
    assert said[0].startswith("At 512 tokens use BlockLocal()"), "the other is too inexact"
    assert said[-1] == "Not timed, for lack of --seconds: 2 more, which are no estimates of exact attention."


class Machine:
    """Time that passes only where something is measured: so many seconds an error, a pass of each mechanism."""

    def __init__(self, patch: pytest.MonkeyPatch, error: float, passes: dict[str, float], reading: float = 0.0) -> None:
        self.now, self.order = 0.0, list[str]()
        source = Gaussian(2, 8)
        layers = source.layers(8)

        def read(length: int) -> Any:
            self.now += reading
            return layers

        def errors(scene: Scene, mechanism: Any) -> Error:
            self.now += error
            self.order.append(f"error of {mechanism!r}")
            return Error(repr(mechanism), 8, "Softmax", [[0.05]])

        def competitors(mechanisms: list[Any]) -> list[Competitor]:
            def make(name: str) -> Passes:
                self.order.append(name)

                def run() -> None:
                    self.now += passes.get(name, 1.0)

                return Passes(run, run)

            names = [EXACT, *map(repr, mechanisms)]
            return [Competitor(name, lambda *_, name=name: make(name), 1.0) for name in names]

        def counted(run: Any, device: Any) -> tuple[int, int]:
            run()
            return 0, 0

        patch.setattr("time.perf_counter", lambda: self.now)
        patch.setattr(source, "layers", read)
        patch.setattr(Scene, "error", errors)
        patch.setattr(compare, "against_exact", competitors)
        patch.setattr(measure, "counted", counted)
        self.source = source

    def advice(self, mechanisms: list[Any], seconds: float) -> Advised:
        """What ``advise`` makes of it."""
        found = Advised({"length": 8, "budget": 0.1, "pass": "forward"})
        setting = Setting(2, 8, torch.device("cpu"), torch.float32, False, False, 0)
        compare.compare(compare.Plan(self.source, mechanisms, [8], setting, seconds), found)
        found.answer(mechanisms)
        return found


SLOW = {EXACT: 2.0, "BlockLocal()": 0.5, "Favor()": 3.0, "AFTSimple()": 0.1}


@pytest.mark.parametrize(("error", "seconds", "reading"), [(0.1, 20, 0), (5.0, 20, 1), (1.0, 40, 3), (0.0, 5, 0)])
def test_candidates_come_in_order_of_promise_and_none_is_passed_over(
    error: float, seconds: float, reading: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the time is too short for one that may be the answer, none is given, but a time that will do."""
    chosen = parsed("AFTSimple", "Favor", "FavorPlus", "Nystrom", "Local", "BlockLocal", "BigBird", "Linformer")
    machine = Machine(monkeypatch, error, SLOW, reading)
    found = machine.advice(chosen, seconds)
    assert found.advice["use"] is None
    more = re.fullmatch(r"At 8 tokens undecided: give --seconds (\d+)\.", found.advice["words"][0])
    assert more, found.advice["words"]
    again = Machine(monkeypatch, error, SLOW, reading)
    found = again.advice(chosen, int(more[1]))
    assert found.advice["words"][0].startswith("At 8 tokens use BlockLocal(): 4 times as fast")
    assert found.advice["use"] == "BlockLocal()"
    promise = ["BigBird()", "Local()", "BlockLocal()", "Nystrom()", "FavorPlus()", "Favor()"]
    assert again.order[:6] == [f"error of {name}" for name in promise], (
        "what records say is close, whatever the catalogue"
    )
    assert again.order[6] == EXACT
    assert {*again.order[7:13]} == {*promise}, "before what cannot be the answer"
    assert again.order[13:15] in ([], ["Linformer()"], ["Linformer()", "AFTSimple()"]), "then what may be trained"


def test_beyond_its_positions_a_model_is_told_the_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exact attention at extended positions is no reference, and no verdict is given on it."""
    (tmp_path / "words.txt").write_text(WORDS)
    place = str(saved(tmp_path / "model", "BertModel"))
    asked = ["advise", place, "--threads", "1", "--seconds", "20", "--text", "words.txt", "--mechanisms", "BlockLocal"]
    assert command_line.run([*asked, "--length", "64"]) == 0
    found = Advised.read(Path("out/advise/advice.json"))
    assert found.advice["use"] == "chunks of 48 tokens"
    first, *decision = found.advice["words"]
    assert first.startswith("Exact attention at 64 tokens is no reference: learned positions extended from 48 tokens")
    assert decision == [*LONG]
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.index(first) < shown.index(LONG[0]) < shown.index(advice.NO_REFERENCE)
    assert "keep exact attention" not in shown
    assert command_line.run([*asked, "--length", "48"]) == 0
    assert not any(words in capsys.readouterr().out for words in ("no reference", LONG[0][:40]))


def test_a_row_has_the_error_and_the_speed_of_one_length() -> None:
    """An error at fewer tokens stands in words that name them, not in the column beside a speed at more."""
    found = Advised({"length": 2048, "budget": 0.1, "pass": "forward"}, *_cells_and_errors())
    found.answer(parsed("Local(window=2)", "FavorPlus", "BlockLocal"))
    rows = {row[0]: row for row, _ in advice.ranking(found).rows}
    shown = {row[0].text: (row[2].text, row[6].text) for row in rows.values()}
    assert shown["BlockLocal()"] == ("30 % / 30 %", "median error beyond 10 %")
    assert shown["Local(window=2)"][0] == shown["FavorPlus()"][0] == "-"
    assert shown["Local(window=2)"][1].endswith("its error is known at 512 tokens only: 5 %")
    assert shown["FavorPlus()"][1] == "median error beyond 10 %, 60 % at 512 tokens"


def _cells_and_errors() -> tuple[list[Cell], list[Error]]:
    made = record({"Local(window=2)": 0.5, "FavorPlus()": 0.5, "BlockLocal()": 0.5}, {"Local(window=2)": 0.05}, 2048)
    more = [Error("FavorPlus()", 512, "Softmax", [[0.6]]), Error("BlockLocal()", 2048, "Softmax", [[0.3]])]
    return made.cells, [*made.errors, *more]


def test_what_was_late_is_one_line() -> None:
    chosen = parsed("LogAttention", "AFTSimple", "Linformer")
    late = record({}, {}, 16)
    late.cells += [Cell(repr(each), 16, "over budget", "late") for each in chosen]
    ranked(late, chosen)
    assert advice.unranked(late) == {"Not measured": [(", ".join(map(repr, chosen)), "over budget: late")]}
