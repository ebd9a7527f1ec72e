"""Studies: the same for every mechanism, a record of the records' shape, resumed where it was stopped."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import study, tasks
from experiments.study import ALONE, EXACT, Result, Study, matched, parameters

RECORDS = Path(__file__).parents[2] / "records"
COMMAND = [
    "Copy(symbols=3, words=3)", "--mechanisms", "LinearAttention", "Local(window=2) + Softmax", "--steps", "6",
    "--seeds", "2", "--width", "8", "--heads", "2", "--batch-size", "4", "--evaluate-every", "3", "--log-every", "2",
    "--evaluation-batches", "1",
]  # fmt: skip
NAMES = [EXACT, ALONE, "LinearAttention()", "Local(window=2) + Softmax()"]


def without_times(record: Study) -> list[dict[str, Any]]:
    kept = ("mechanism", "seed", "status", "value", "best", "steps", "peak_bytes", "parameters", "hidden")
    rows = [{name: getattr(result, name) for name in kept} for result in record.results]
    return [row | {"curve": [(s, v) for s, _, v in r.curve]} for row, r in zip(rows, record.results, strict=True)]


def test_a_stopped_study_resumes_to_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main([*COMMAND, "--out", str(tmp_path / "whole")]) == 0
    said = capsys.readouterr().out
    assert "every run had the same number of steps" in said
    assert "LinearAttention()" in said
    assert "baseline: chance" in said
    inner, runs = study.train, [0]

    def train(*args: Any, watch: Any, **options: Any) -> Any:
        runs[0] += 1

        def seen(line: dict[str, Any]) -> None:
            watch(line)
            if runs[0] == 3 and line["step"] == 4:
                os.kill(os.getpid(), signal.SIGINT)

        return inner(*args, watch=seen, **options)

    out = ["--out", str(tmp_path / "stopped")]
    monkeypatch.setattr(study, "train", train)
    assert study.main([*COMMAND, *out]) == 130
    assert "not reached" in capsys.readouterr().out
    half = Study.read(tmp_path / "stopped" / "study.json")
    assert (half.meta["status"], len(half.results)) == ("interrupted", 2)
    assert study.main([*COMMAND, *out]) == 2
    assert "continue it (--resume)" in capsys.readouterr().err
    assert study.main([*COMMAND, *out, "--resume", "--lr", "0.1"]) == 2
    assert "training was" in capsys.readouterr().err
    assert study.main([*COMMAND, *out, "--resume"]) == 0
    records = [Study.read(tmp_path / name / "study.json") for name in ("whole", "stopped")]
    assert without_times(records[0]) == without_times(records[1])
    assert [(r.seed, r.mechanism) for r in records[0].results] == [(seed, name) for seed in (0, 1) for name in NAMES]
    assert records[1].meta["status"] == "complete"
    assert records[1].meta["command"][:3] == ["python", "-m", "experiments.study"]
    assert all([step for step, _, _ in result.curve] == [0, 3, 6] for result in records[0].results)
    picture = (tmp_path / "whole" / "study.svg").read_text()
    assert "exact attention" in picture
    assert "no mixing" in picture
    assert not list((tmp_path / "whole").glob("cells/*/checkpoints"))


def test_the_record_has_the_shape_of_those_that_are_kept(tmp_path: Path) -> None:
    assert study.main([*COMMAND[:1], "--steps", "1", "--seeds", "1", *COMMAND[8:], "--out", str(tmp_path)]) == 0
    kept = json.loads((RECORDS / "2026-11-27-study-byte-lm-convolved-rotary.json").read_text())
    made = json.loads((tmp_path / "study.json").read_text())
    assert made.keys() == kept.keys()
    assert made["schema"] == kept["schema"]
    assert {*kept["meta"]} <= {*made["meta"]}
    assert made["results"][0].keys() == kept["results"][0].keys()


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*-study-*.json")), ids=lambda path: path.stem)
def test_every_kept_study_is_read_and_drawn(path: Path) -> None:
    record = Study.read(path)
    names = [name for name in record.meta["mechanisms"] if record.summary(name)]
    assert names
    rows = study.table(record).rows
    assert len(rows) == len(record.meta["mechanisms"]) + len(record.meta["baselines"])
    figure, sentence = study.figure(record)
    assert f"of {len(names)} mechanisms on {record.meta['task']}" in sentence
    assert len(figure.axes) == (3 if any(record.by_position(name) for name in names) else 2)
    assert all(record.curve(name) for name in names)
    assert tasks.parse(record.meta["task"]).metric == record.meta["metric"]


def test_models_have_as_many_parameters_as_that_with_exact_attention() -> None:
    task, model = tasks.parse("Lookup(vocab=32, context=16)"), {"width": 32, "heads": 2}
    exact = parameters(matched(task, EXACT, model))
    for name in (ALONE, "LinearAttention()", "RandomSynthesizer()", "Local(window=2) + GMLP()"):
        config = matched(task, name, model)
        assert abs(parameters(config) - exact) <= config.layers * (2 * config.width + 1) / 2, name
        assert config.hidden != 128 or name in (ALONE, "LinearAttention()")


def test_means_and_intervals_are_over_the_seeds() -> None:
    runs = [
        Result("A()", seed, "complete", value, value, 4, 0.1 + seed, 10 * seed, 7, 3, [(0, 0.0, 0.0), (4, 60.0, value)])
        for seed, value in enumerate((0.2, 0.4, 0.6))
    ]
    failed = Result("A()", 3, "failed", None, None, 0, 0.0, 0, 0, 3)
    record = Study({"equal": "minutes", "mechanisms": ["A()"]}, [*runs, failed])
    summary = record.summary("A()")
    assert summary is not None
    assert (summary.mean, summary.seeds, summary.step_seconds, summary.peak_bytes) == (pytest.approx(0.4), 3, 1.1, 20)
    assert summary.spread == pytest.approx(4.30 * 0.2 / 3**0.5)
    assert record.curve("A()") == {0.0: 0.0, 1.0: pytest.approx(0.4)}
    assert record.summary("B()") is None


def test_what_cannot_do_the_task_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_rng_state()
    assert study.main(["copy", "--mechanisms", "FNet", "--out", str(tmp_path / "a")]) == 2
    assert "FNet(): " in (said := capsys.readouterr().err)
    assert "causal" in said
    assert study.main(["listops", "--mechanisms", "FNet", "--out", str(tmp_path / "a")]) == 2
    assert "key_mask" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert torch.equal(torch.get_rng_state(), before)
