"""A study: matched models, controls, intervals, resuming, its page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fast_attention import cli, tasks
from fast_attention.lab.numbers import exactly
from fast_attention.lab.study import drawings, page, run
from fast_attention.lab.study.plan import ALONE, EXACT, Plan, folder, matched, parameters
from fast_attention.lab.study.record import Result, Study
from fast_attention.lab.tradeoff import frontier
from fast_attention.training import journal
from fast_attention.training.settings import TrainingSettings
from fast_attention.training.steps import config_for
from tests.lab.reading_pages import assert_one_file, pictures, values

TINY = ("--steps", "6", "--width", "16", "--heads", "2", "--layers", "1", "--batch-size", "4", "--evaluate-every", "3")
TASK = "Copy(symbols=3, words=3)"


def study(capsys: pytest.CaptureFixture[str], out: Path, *options: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["study", TASK, "--out", str(out), *TINY, *options])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    "name", ["LinearAttention()", "FavorPlus(num_features=8)", "Linformer(rank=4)", "AFTSimple()", "FNet()", "GMLP()"]
)
def test_models_are_matched_by_parameters(name: str) -> None:
    task = tasks.parse("protein-mlm")
    model = {"width": 64, "layers": 2, "heads": 2, "max_len": 512}
    wanted = parameters(config_for(task, mechanism=EXACT, **model))
    config = matched(task, name, model)
    found = parameters(config)
    assert abs(found - wanted) <= max(2 * (2 * 64 + 1), 0.01 * wanted) or config.hidden == 1, (found, wanted)
    assert config.mechanism == name


def test_a_heavy_mechanism_stays_larger() -> None:
    model = {"width": 16, "layers": 1, "heads": 2}
    config = matched(tasks.parse("protein-mlm"), "RandomSynthesizer()", model)
    assert config.hidden == 1


def test_the_frontier_is_what_nothing_beats() -> None:
    points = [(1.0, 0.2), (2.0, 0.5), (2.0, 0.4), (3.0, 0.5), (4.0, 0.9), (5.0, 0.8)]
    assert frontier(points, tuple, rising=True) == [(1.0, 0.2), (2.0, 0.5), (4.0, 0.9)]
    assert frontier([(cost, -value) for cost, value in points], tuple, rising=False) == [
        (1.0, -0.2), (2.0, -0.5), (4.0, -0.9)
    ]  # fmt: skip


def test_intervals_are_students() -> None:
    def result(seed: int, value: float) -> Result:
        return Result(EXACT, seed, "complete", value, value, 5, 0.01, 10, 20, 4)

    record = Study({}, [result(0, 1.0), result(1, 2.0), result(2, 3.0)])
    summary = record.summary(EXACT)
    assert summary is not None
    assert summary.mean == 2.0
    assert summary.spread == pytest.approx(4.303 / math.sqrt(3), rel=2e-3)
    alone = Study({}, [result(0, 1.0)]).summary(EXACT)
    assert alone is not None
    assert alone.spread is None
    assert record.summary("FNet()") is None


def test_a_study_from_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = study(capsys, tmp_path, "--mechanisms", "LinearAttention", "--seeds", "2")
    assert code == 0
    for words in ("no mixing", "exact attention", "LinearAttention()", "baseline: chance", "±"):
        assert words in out
    record = Study.from_json((tmp_path / "study.json").read_text())
    assert record.meta["status"] == "complete"
    assert [(r.mechanism, r.seed) for r in record.results] == [
        (name, seed) for seed in (0, 1) for name in (EXACT, ALONE, "LinearAttention()")
    ]
    for result in record.results:
        assert result.steps == 6
        assert result.value is not None
        assert result.peak_bytes > 1000
        assert result.step_seconds > 0
        assert [step for step, _, _ in result.curve] == [0, 3, 6]
        assert (tmp_path / "cells" / folder(result.mechanism, result.seed) / "model" / "config.json").exists()
    one, two = (next(r for r in record.results if r.mechanism == EXACT and r.seed == seed) for seed in (0, 1))
    assert one.curve[1:] != two.curve[1:]
    assert record.equal == "steps"
    assert "Every run had the same number of steps" in out
    assert not one.by_position, "no language modelling"
    html = (tmp_path / "study.html").read_text()
    assert_one_file(html)
    costs, curves = pictures(html)
    for name, words in ((EXACT, "exact attention"), ("LinearAttention()", "LinearAttention()")):
        summary = record.summary(name)
        assert summary is not None
        said = f"{words}: accuracy {exactly(summary.mean)} ± {exactly(summary.spread or 0.0)}, "
        assert f"{said}{exactly(1000 * summary.step_seconds)} milliseconds" in costs
        assert f"{words}: accuracy {exactly(summary.mean)} at step 6" in curves
        assert {summary.mean, summary.peak_bytes} <= {*values(html)}
    assert json.loads((tmp_path / "study.json").read_text())["schema"] == "fast-attention study 2"


def test_layers_of_different_kinds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = study(capsys, tmp_path, "--mechanisms", "Local(window=1)+FavorPlus(num_features=4)", "--seeds", "1")
    assert code == 0
    name = "Local(window=1) + FavorPlus(num_features=4)"
    assert name in out
    config = json.loads((tmp_path / "cells" / folder(name, 0) / "model" / "config.json").read_text())
    assert config["mechanism"] == name.split(" + ")
    sizes = {r.parameters for r in Study.from_json((tmp_path / "study.json").read_text()).results}
    assert max(sizes) - min(sizes) <= 2 * 33, "as many parameters, up to a unit of the feed-forward layers"
    assert study(capsys, tmp_path / "b", "--mechanisms", "FNet, Softmax + Local", "--seeds", "1")[0] == 2


def test_a_stopped_study_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the second run, it keeps the first and ends as one that was never stopped."""
    study(capsys, tmp_path / "whole", "--seeds", "1")
    train, calls = run.loop.train, []

    def stopping(*args: Any, **options: Any) -> Any:
        calls.append(args[3])
        outcome = train(*args, **options)
        return outcome._replace(status="interrupted") if len(calls) == 2 else outcome

    monkeypatch.setattr(run.loop, "train", stopping)
    code, _, err = study(capsys, tmp_path / "cut", "--seeds", "1")
    assert code == 130
    assert "--resume" in err
    partial = Study.from_json((tmp_path / "cut" / "study.json").read_text())
    assert len(partial.results) == 1
    assert partial.meta["status"] == "interrupted"
    assert "partial" in (tmp_path / "cut" / "study.html").read_text()
    code, _, err = study(capsys, tmp_path / "cut", "--seeds", "1")
    assert code == 2
    assert "--resume" in err
    code, _, err = study(capsys, tmp_path / "cut", "--seeds", "1", "--lr", "0.1", "--resume")
    assert code == 2
    assert "training was" in err
    calls.clear()
    monkeypatch.setattr(run.loop, "train", train)
    code, _, _ = study(capsys, tmp_path / "cut", "--seeds", "1", "--resume")
    assert code == 0
    ends = [
        [(r.mechanism, r.value, [(s, v) for s, _, v in r.curve]) for r in Study.from_json(text).results]
        for text in ((tmp_path / name / "study.json").read_text() for name in ("whole", "cut"))
    ]
    assert ends[0] == ends[1]


def test_a_study_killed_in_its_first_run_goes_on_with_its_own_settings_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints would be gone on from with another learning rate."""

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run.loop, "train", killed)
        with pytest.raises(Killed):
            study(capsys, tmp_path, "--seeds", "1")
    code, _, err = study(capsys, tmp_path, "--seeds", "1", "--lr", "0.1")
    assert (code, "add --resume" in err) == (2, True)
    code, _, err = study(capsys, tmp_path, "--seeds", "1", "--lr", "0.1", "--resume")
    assert (code, "training was" in err) == (2, True)
    assert study(capsys, tmp_path, "--seeds", "1", "--resume")[0] == 0


def test_folders_differ_and_fit_into_a_file_system() -> None:
    mixture = " + ".join(["Hybrid(far=LearnedFeatures(num_features=32, scale=0.5))"] * 6)
    others = [folder(mixture, 0), folder(f"{mixture} + FNet()", 0), folder(mixture, 1)]
    assert len({*others}) == 3
    assert max(map(len, others)) < 200
    assert folder("Local(window=64)", 2) == "Local-window-64-seed2"
    assert folder("Softmax(scale=-0.5)", 0) != folder("Softmax(scale=0.5)", 0)


def test_a_study_grows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By mechanisms and seeds: the runs that it has stay as they are, and the others are as if made at once."""
    asked = ("--mechanisms", "LinearAttention", "--positions", "learned", "--seeds", "2")
    assert study(capsys, tmp_path / "whole", *asked)[0] == 0
    assert study(capsys, tmp_path / "grown", "--positions", "learned", "--seeds", "1")[0] == 0
    record = Study.read(tmp_path / "grown" / "study.json")
    before, record.meta["parts"] = record.results, [{"name": "of another day"}]
    record.save(tmp_path / "grown" / "study.json")
    assert study(capsys, tmp_path / "grown", *asked, "--resume")[0] == 0
    grown, whole = (Study.read(tmp_path / name / "study.json") for name in ("grown", "whole"))
    assert grown.results[: len(before)] == before
    assert {(r.mechanism, r.seed): r.value for r in grown.results} == {
        (r.mechanism, r.seed): r.value for r in whole.results
    }
    assert grown.meta["seeds"] == 2
    assert grown.meta["parts"] == record.meta["parts"]
    code, _, err = study(capsys, tmp_path / "grown", *asked[2:], "--resume")
    assert (code, "holds runs of LinearAttention(): give these --mechanisms too" in err) == (2, True)
    code, _, err = study(capsys, tmp_path / "grown", *asked[:4], "--seeds", "1", "--resume")
    assert (code, "holds 2 seeds: give --seeds 2 or more, not 1" in err) == (2, True)


def test_a_study_goes_on_with_the_same_data(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert study(capsys, tmp_path, "--seeds", "1")[0] == 0
    monkeypatch.setattr(type(tasks.parse(TASK)), "describe", lambda task: {"training": "other texts"})
    code, _, err = study(capsys, tmp_path, "--seeds", "2", "--resume")
    assert code == 2
    assert "data was" in err
    assert "other texts" in err


def test_a_study_keeps_models_and_no_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert study(capsys, tmp_path, "--seeds", "1")[0] == 0
    for name in (EXACT, ALONE):
        assert {path.name for path in (tmp_path / "cells" / folder(name, 0)).iterdir()} >= {"model", journal.LOG}
        assert not (tmp_path / "cells" / folder(name, 0) / "checkpoints").exists()
    left = tmp_path / "cells" / folder(EXACT, 0) / "checkpoints" / "step-6"  # killed before they were deleted
    left.mkdir(parents=True)
    assert study(capsys, tmp_path, "--seeds", "1", "--resume")[0] == 0
    assert not left.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mechanisms", "FNet"), "FNet"),
        (("--mechanisms", "Sofmax"), "Softmax"),
        (("--width", "15"), "multiple of heads"),
        (("--equal", "minutes"), "give --minutes and no --steps"),
        (("--equal", "minutes", "--minutes", "1"), "give --minutes and no --steps"),
        (("--equal", "steps", "--minutes", "1"), "give --steps and no --minutes"),
        (("--equal", "time"), "choose one of steps, minutes"),
    ],
)
def test_what_cannot_be_studied(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = study(capsys, tmp_path / "out", *options)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "study.json").exists()


@pytest.mark.parametrize(
    ("others", "wanted"), [(["FavorPlus()"], "rotary"), (["Local() + LinearAttention()"], "learned")]
)
def test_automatic_positions_are_the_same_for_all(others: list[str], wanted: str) -> None:
    model: dict[str, Any] = {"width": 16, "heads": 2, "layers": 1}
    plan = Plan.of(tasks.parse(TASK), others, 1, TrainingSettings(steps=2), model)
    assert plan.model["positions"] == wanted
    assert {matched(plan.task, name, plan.model).positions for name in plan.mechanisms} == {wanted}


@pytest.mark.parametrize(
    ("names", "kind", "told"),
    [
        (
            [EXACT, "WKV()", "Local(window=4) + WKV()"],
            "learned",
            "no rotary ones for WKV(), Local(window=4) + WKV(), by",
        ),
        ([EXACT, "WKV()"], "none", ""),
        ([EXACT, ALONE], "learned", ""),
        (["WKV()"], "learned", ""),
    ],
)
def test_the_table_says_whom_learned_positions_are_for(names: list[str], kind: str, told: str) -> None:
    meta = {"mechanisms": names, "seeds": 1, "metric": "accuracy", "baselines": {}, "model": {"positions": kind}}
    title = page.table(Study(meta)).title
    assert told in title
    assert ("learned positions" in title) == bool(told)


def test_seeds_are_other_weights_and_other_batches_and_alike_for_all() -> None:
    plan = Plan.of(tasks.parse(TASK), [], 2, TrainingSettings(steps=2), {"width": 16, "heads": 2})
    one, two = (plan.settings_for(seed) for seed in (0, 1))
    assert (one.seed, one.order) == (0, 0)
    assert (two.seed, two.order) == (1, 1)
    assert plan.cells == [(EXACT, 0), (ALONE, 0), (EXACT, 1), (ALONE, 1)]


def test_rows_stand_best_first_and_say_what_diverged() -> None:
    def result(name: str, value: float | None) -> Result:
        return Result(name, 0, "complete" if value else "failed", value, value, 5, 0.01, 10, 20, 4)

    meta = {"metric": "nats", "mechanisms": [EXACT, ALONE, "AFTSimple()"], "baselines": {"counts": 2.5}}
    rows = page.rows(Study(meta, [result(EXACT, 2.0), result(ALONE, 3.0), result("AFTSimple()", None)]))
    assert [row[0].split("  ")[0] for row in rows] == [EXACT, "baseline: counts", ALONE, "AFTSimple()"]
    assert rows[1][2] == "+0.5000"
    assert rows[3][1] == "diverged"


@pytest.mark.parametrize("status", ["complete", "stopped early"])
@pytest.mark.parametrize("equal", ["steps", "minutes", "steps or minutes"])
def test_the_table_says_at_most_where_patience_ended_a_run(status: str, equal: str) -> None:
    results = [Result(EXACT, 0, "complete", 2.0, 2.0, 5, 0.01, 10, 20, 4)]
    results.append(Result(ALONE, 0, status, 2.0, 2.0, 3, 0.01, 10, 20, 4))
    meta = {"metric": "nats", "mechanisms": [EXACT, ALONE], "baselines": {}, "equal": equal, "model": {}}
    title = page.table(Study(meta, results)).title
    assert title is not None
    assert title.count("at most") == (equal == "steps or minutes" or status == "stopped early")


@pytest.mark.parametrize("price", [(0.003, 10_000), (1e-6, 1_000), (0.0, 0)])
@pytest.mark.parametrize("others", [0, 1])
def test_a_picture_of_few_equal_results(price: tuple[float, int], others: int) -> None:
    """One point, or two in one place, and costs that are round or none."""
    names = [EXACT, "FNet()"][: 1 + others]
    seconds, size = price
    results = [Result(name, 0, "complete", 0.25, 0.25, 6, seconds, size, 10, 4, [(6, 1.0, 0.25)]) for name in names]
    record = Study({"mechanisms": names, "metric": "accuracy", "baselines": {"chance": 0.25}}, results)
    assert drawings.costs(record).svg.startswith("<svg")
    assert drawings.curves(record).svg.startswith("<svg")


def test_equal_minutes_of_a_language_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No number of steps ends a run; the losses by position are those of the best model, and their mean its value."""
    (tmp_path / "text.txt").write_bytes(b"abcdefghij" * 1000)
    task = f"ByteLM(path={str(tmp_path / 'text.txt')!r}, context=80)"
    tiny = [word for word in TINY if word not in ("--steps", "6")]
    out = tmp_path / "out"
    options = ["--equal", "minutes", "--minutes", "0.005", "--seeds", "1", "--out", str(out), *tiny]
    with pytest.raises(SystemExit) as stop:
        cli.main(["study", task, *options])
    said = capsys.readouterr().out
    assert not stop.value.code
    record = Study.read(out / "study.json")
    assert record.equal == "minutes"
    for words in ("Every run had the same time", "bits per byte by position in the context", "32 to 63", "64 to 79"):
        assert words in said
    for result in record.results:
        assert result.steps > 0
        assert result.curve[-1][1] >= 0.3, "seconds"
        assert [(first, last) for first, last, _ in result.by_position] == [(0, 31), (32, 63), (64, 79)]
        mean = sum((last - first + 1) * loss for first, last, loss in result.by_position) / 80
        assert mean == pytest.approx(result.best, abs=1e-5)
    html = (out / "study.html").read_text()
    assert "every run had the same time, evaluations included" in html
    assert "By position in the context" in html
    assert html.count("<svg") == 3


def test_a_stopped_study_of_equal_minutes_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minutes that a run has had count when it is resumed, and another budget is another study."""
    train, calls = run.loop.train, []

    def stopping(*args: Any, **options: Any) -> Any:
        calls.append(args[3])
        outcome = train(*args, **options)
        return outcome._replace(status="interrupted") if len(calls) == 2 else outcome

    monkeypatch.setattr(run.loop, "train", stopping)
    tiny = [word for word in TINY if word not in ("--steps", "6")]
    begin = ["study", TASK, "--seeds", "1", "--out", str(tmp_path), *tiny, "--equal", "minutes"]

    def code(*options: str) -> int:
        with pytest.raises(SystemExit) as stop:
            cli.main([*begin, *options])
        return int(stop.value.code or 0)

    assert code("--minutes", "0.005") == 130
    before = [line for line in journal.read(calls[1]) if "valid" in line][-1]
    assert code("--minutes", "0.006", "--resume") == 2
    assert "minutes=0.006" in capsys.readouterr().err
    assert code("--minutes", "0.005", "--resume") == 0
    record = Study.read(tmp_path / "study.json")
    assert record.equal == "minutes"
    assert record.results[1].curve[-1][:2] == (before["step"], before["seconds"]), "its time was spent"


def test_ctrl_c_between_two_runs_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "peak", stopped)
    code, _, err = study(capsys, tmp_path, "--seeds", "1")
    assert (code, "--resume" in err) == (130, True)
    assert Study.read(tmp_path / "study.json").meta["status"] == "interrupted"


def test_ctrl_c_while_the_last_page_is_drawn_leaves_a_complete_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = page.html

    def stopped(record: Study) -> str:
        if record.meta["status"] == "complete":
            raise KeyboardInterrupt
        return real(record)

    with monkeypatch.context() as patch:
        patch.setattr(page, "html", stopped)
        assert study(capsys, tmp_path, "--seeds", "1")[0] == 130
    record = Study.read(tmp_path / "study.json")
    assert (record.meta["status"], "partial" in (tmp_path / "study.html").read_text()) == ("complete", True)
    monkeypatch.setattr(run, "_cell", lambda *_: pytest.fail("trained again"))
    assert study(capsys, tmp_path, "--seeds", "1", "--resume")[0] == 0
    assert "it is partial" not in (tmp_path / "study.html").read_text()


def test_records_without_positions_or_budget_load() -> None:
    old = sorted((Path(__file__).parents[2] / "records").glob("2026-11-21-study-*.json"))
    assert old
    for path in old:
        record = Study.read(path)
        assert record.equal == "steps"
        assert page.by_position(record) is None
        assert "By position" not in page.html(record)


def test_losses_by_position_are_means_over_the_seeds() -> None:
    def result(seed: int, losses: list[float]) -> Result:
        rows = [(0, 31, losses[0]), (32, 49, losses[1])]
        return Result(EXACT, seed, "complete", 2.0, 2.0, 5 + 2 * seed, 0.01, 10, 20, 4, [(5, 60.0 * seed, 2.0)], rows)

    meta = {"metric": "nats", "mechanisms": [EXACT, ALONE], "baselines": {}, "equal": "minutes"}
    record = Study(meta, [result(0, [3.0, 2.0]), result(1, [4.0, 1.0])])
    assert record.by_position(EXACT) == {(0, 31): 3.5, (32, 49): 1.5}
    assert record.by_position(ALONE) == {}
    table = page.by_position(record)
    assert table is not None
    assert table.heads == ["mechanism", "0 to 31", "32 to 49"]
    assert [list(row.cells) for row in table.rows] == [["exact attention", "3.5000", "1.5000"]]
    assert page.rows(record)[0][4] == "6", "the mean of 5 and 7 steps"
    assert drawings.by_position(record).alt.startswith("nats on the validation set (lower is better) by position")
