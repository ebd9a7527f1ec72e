"""Training: it learns, with the losses that records were made with; stopped runs resume to the bit; two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import models, tasks, train
from experiments.arguments import Arguments, YesNo
from experiments.models import Model
from experiments.tasks import IGNORED
from experiments.train import Diverged, Outcome, TrainingSettings, config_for, read_log
from fast_attention.files import InUse

ROOT = Path(__file__).parents[2]
TASK = tasks.parse("Copy(symbols=4, words=4)")
CONFIG = config_for(
    TASK, mechanism=("LinearAttention", "Softmax"), width=16, heads=2, dropout=0.1, conv=2, positions="learned"
)
SETTINGS = TrainingSettings(steps=30, log_every=10, evaluate_every=30, evaluation_batches=2, accumulate=2)
OPTIONS = [
    "--mechanism", "LinearAttention", "Softmax", "--width", "16", "--heads", "2", "--conv", "2", "--positions",
    "learned", "--log-every", "10", "--evaluate-every", "30", "--evaluation-batches", "2", "--accumulate", "2",
]  # fmt: skip
FINE = replace(SETTINGS, log_every=1, evaluate_every=10, save_every=7)


def run(out: Path | None = None, settings: TrainingSettings = SETTINGS, **options: Any) -> Outcome:
    return train.train(TASK, CONFIG, settings, out, **options)


def numbers(out: Path) -> list[dict[str, Any]]:
    """The log without times."""
    kept = ("step", "loss", "norm", "rate", "valid", "valid_loss")
    return [{name: line[name] for name in kept if name in line} for line in read_log(out)]


def stopping(after: int) -> Callable[[dict[str, Any]], None]:
    """Ctrl-C once a step is logged."""
    return lambda line: os.kill(os.getpid(), signal.SIGINT) if line["step"] == after and "loss" in line else None


def test_losses_are_those_of_the_records() -> None:
    """By 02d9f59, whose package held the loop; with dropout, accumulation, convolutions and alternating layers."""
    lines: list[dict[str, Any]] = []
    outcome = run(watch=lines.append)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == pytest.approx([1.624444603919983, 1.542952537536621, 1.5221688747406006], rel=1e-4)
    assert [line["valid"] for line in lines if "valid" in line] == [0.18359375, outcome.valid]
    assert outcome[:2] == ("complete", 30)
    assert (outcome.valid, outcome.best_step, outcome.parameters) == (pytest.approx(0.3671875, abs=0.02), 30, 6902)
    task = tasks.parse("ListOps(shortest=8, longest=24)")
    config = config_for(task, mechanism="Local(window=4)", width=16, heads=2)
    half = replace(SETTINGS, steps=10, precision="bfloat16", batch_size=16, accumulate=1)
    train.train(task, config, half, watch=lines.append)
    assert next(x for x in lines[::-1] if "loss" in x)["loss"] == pytest.approx(2.3714, abs=2e-2)


def test_the_settings_decide_the_losses() -> None:
    first: dict[str, float] = {}
    for name, changed in {
        "plain": {}, "seed": {"seed": 1}, "order": {"order": 1}, "lr": {"lr": 1e-2}, "clip": {"clip": 1e-4},
        "decay": {"weight_decay": 5.0},
    }.items():  # fmt: skip
        lines: list[dict[str, Any]] = []
        run(settings=replace(SETTINGS, steps=3, log_every=3, evaluation_batches=1, **changed), watch=lines.append)
        first[name] = next(line["loss"] for line in lines if "loss" in line)
    assert len({*first.values()}) == len(first)


def test_the_rate_rises_and_falls() -> None:
    settings = TrainingSettings(steps=100, warmup=0.1, lr=1.0)
    rates = [train.rate(settings, step, 0.0) for step in range(100)]
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates.index(max(rates)) in (9, 10)
    assert rates[0] < 0.11
    assert rates[-1] < 0.01
    timed = replace(settings, steps=0, minutes=1.0)
    assert train.rate(timed, 5, 33.0) == pytest.approx(0.5, abs=1e-6)
    assert train.rate(timed, 5, 70.0) == 0.0


@pytest.mark.parametrize("clock", ["wall", "processor"])
def test_minutes_end_a_run(clock: Any) -> None:
    outcome = run(settings=replace(SETTINGS, steps=0, minutes=0.02, clock=clock, evaluate_every=1000))
    assert outcome.status == "complete"
    assert outcome.seconds == pytest.approx(1.2, abs=0.4)


def test_patience_ends_a_run_and_the_best_model_is_kept(tmp_path: Path) -> None:
    outcome = run(tmp_path, replace(SETTINGS, lr=0.0, evaluate_every=2, patience=3))
    assert outcome[:2] == ("stopped early", 6)
    assert outcome.best_step == 0
    kept = train.evaluate(models.load(tmp_path / "model"), TASK, SETTINGS)
    assert kept.value == outcome.best
    assert kept.by_position == []


def test_language_models_lose_by_position() -> None:
    task = tasks.parse("ByteLM(context=80)")
    torch.manual_seed(0)
    model = Model(config_for(task, width=16, heads=2, layers=1)).eval()
    score = train.evaluate(model, task, replace(SETTINGS, batch_size=4))
    assert [row[:2] for row in score.by_position] == [(0, 31), (32, 63), (64, 79)]
    mean = sum(loss * (last + 1 - first) for first, last, loss in score.by_position) / 80
    assert mean == pytest.approx(score.value, rel=1e-6)
    batch = task.batch("valid", 1, 4)
    assert int((batch.targets != IGNORED).sum()) == train.num_targets(batch) == 320
    with torch.no_grad():
        losses = [float(train.loss_of(model, task.batch("valid", i, 4))) for i in range(2)]
    assert score.loss == pytest.approx(sum(losses) / 640, rel=1e-5)


def test_a_stopped_run_resumes_to_the_same_losses(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", FINE)
    assert run(tmp_path / "stopped", FINE, watch=stopping(16)).status == "interrupted"
    again = run(tmp_path / "stopped", FINE, resume=True)
    assert again._replace(seconds=0.0) == whole._replace(seconds=0.0)
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")
    ends = [models.load(tmp_path / name / "model").state_dict() for name in ("whole", "stopped")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    with pytest.raises(ValueError, match="holds a run: resume it"):
        run(tmp_path / "whole", FINE)
    with pytest.raises(ValueError, match="seed 0, not 1: it cannot be resumed so"):
        run(tmp_path / "whole", replace(FINE, seed=1), resume=True)
    assert run(tmp_path / "whole", replace(FINE, steps=31), resume=True).step == 31
    assert run(tmp_path / "whole", FINE, restart=True)._replace(seconds=0.0) == whole._replace(seconds=0.0)


def test_a_killed_process_is_resumed_by_a_fresh_one(tmp_path: Path) -> None:
    """Killed at any point, with lines in the log that its last checkpoint does not know."""
    out, fine = tmp_path / "killed", {"--log-every": "1", "--evaluate-every": "10"}
    small = [fine.get(before, option) for before, option in pairwise(["", *OPTIONS])]
    command = [sys.executable, "-m", "experiments.train", repr(TASK), *small, "--dropout", "0.1", "--steps", "100000"]
    command += ["--save-every", "7", "--out", str(out)]
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while len(read_log(out)) < 18:
            assert child.poll() is None
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    reached = read_log(out)[-1]["step"]
    settings = replace(FINE, steps=100_000)
    kept = int(max(path.name for path in (out / "checkpoints").glob("step-*")).split("-")[1])
    assert kept % 7 == 0
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 99, "loss"')
    assert run(out, settings, resume=True, watch=stopping(reached + 5)).status == "interrupted"
    assert run(tmp_path / "whole", settings, watch=stopping(reached + 5)).status == "interrupted"
    assert numbers(out) == numbers(tmp_path / "whole")
    assert len({line["step"] for line in read_log(out) if "loss" in line}) == reached + 5


def test_two_processes_are_one(tmp_path: Path) -> None:
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [
        *launch,
        "-m",
        "experiments.train",
        repr(TASK),
        *OPTIONS,
        "--steps",
        "10",
        "--out",
        str(tmp_path / "two"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    settings = replace(SETTINGS, steps=10)
    train.train(TASK, replace(CONFIG, dropout=0.0), settings, tmp_path / "one")
    for ours, theirs in zip(numbers(tmp_path / "one"), numbers(tmp_path / "two"), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-4)


def test_a_folder_is_one_runs(tmp_path: Path) -> None:
    found: list[str] = []

    def second(line: dict[str, Any]) -> None:
        with pytest.raises(InUse, match="is in use by process"):
            run(tmp_path)
        found.append("refused")

    run(tmp_path, replace(SETTINGS, steps=1, log_every=1), watch=lambda line: found or second(line))
    assert found == ["refused"]


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Diverged, match="try a smaller lr"):
        run(settings=replace(SETTINGS, lr=1e30, clip=0.0, warmup=0.0))
    for settings, words in (
        ({"steps": 0}, "give steps or minutes"), ({"warmup": 1.0}, "below 1"), ({"batch_size": 0}, "at least 1"),
        ({"clock": "processor", "device": "cuda"}, "counts CPUs only"), ({"precision": "float8"}, "precision must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            TrainingSettings(**settings)
    for settings, words in (
        ({"vocab_size": 3}, "has 6 kinds of tokens"), ({"causal": False}, "asks for what comes next"),
        ({"max_len": 4, "positions": "learned"}, "learned positions, max_len=4"),
        ({"head": "classes", "classes": 2}, "has 0 classes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            config_for(TASK, **settings)
    for arguments, words in (
        ([], "name a task"), (["nothing"], "no task or value is called"), (["()"], "'()' is not a task. There are"),
        (["copy", "--width", "7"], "multiple of heads"),
        (["copy", "--mechanism", "FNet", "--positions", "none"], "causal"),
    ):  # fmt: skip
        assert train.main([*arguments, "--out", str(tmp_path / "none")]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("of", ["experiments", "benchmarks"])
def test_no_command_line_takes_an_option_twice(of: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse alone takes the last in silence: every command line here is an ``Arguments``."""
    for path in (ROOT / of).rglob("*.py"):
        assert "= argparse.ArgumentParser(" not in path.read_text(), path
    parser = Arguments()
    parser.add_argument("--mechanisms", nargs="+")
    parser.add_argument("--causal", action=YesNo)
    parser.add_argument("--seed", type=int, default=3)
    for _ in range(2):
        assert parser.parse_args(["--seed", "1", "--no-causal"]).seed == 1
    for words, said in (
        ("--seed 1 --seed=2", "--seed is given twice, 1 and 2"),
        ("--mechanisms A B --mechanisms C", "given twice, ['A', 'B'] and ['C']"),
        ("--causal --no-causal", "given twice, --causal and --no-causal"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(words.split())
        assert said in capsys.readouterr().err


def test_the_command_trains_and_resumes_with_the_runs_own_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)]
    assert train.main([repr(TASK), *OPTIONS, "--steps", "4", *out]) == 0
    said = capsys.readouterr()
    assert "complete at step 4" in said.out
    assert "baseline accuracy 0.2500: chance" in said.out
    assert json.loads(said.err.splitlines()[0])["valid"] == read_log(tmp_path)[0]["valid"]
    assert train.main(["--resume", "--steps", "6", *out]) == 0
    held = train.run_of(tmp_path)
    assert (held["task"], held["settings"]["steps"], held["model"]["conv"]) == (repr(TASK), 6, 2)
    assert train.main(["copy", "--resume", *out]) == 2
    assert "it cannot be resumed so" in capsys.readouterr().err
