"""Training: it learns, it goes on to the bit, two processes do what one does, signals end it well."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks.listops import ListOps
from fast_attention.tasks.recall import Copy, Duplicate
from fast_attention.tasks.task import IGNORED, Batch, Split
from fast_attention.training import checkpoints, journal, steps
from fast_attention.training.loop import Diverged, Outcome, train
from fast_attention.training.processes import Group
from fast_attention.training.settings import TrainingSettings, from_toml
from fast_attention.training.signals import Signals

TASK = Copy(symbols=4, words=3)
SETTINGS = TrainingSettings(
    steps=40, batch_size=4, accumulate=2, evaluate_every=15, evaluation_batches=2, log_every=4, save_every=10
)
ALONE = Group(0, 1, torch.device("cpu"))


def small(task: Any = TASK, **settings: Any) -> ModelConfig:
    return steps.config_for(task, **{"width": 16, "heads": 2, "layers": 2, **settings})


DROPPING = small(mechanism=("FavorPlus(num_features=8)", "Softmax()"), dropout=0.1)


class Ended(Exception):
    """Stands for a kill: nothing is saved on the way out."""


def lines(folder: Path) -> list[dict[str, Any]]:
    """The log without what depends on the machine's speed."""
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second", "step_seconds")}
        for line in journal.read(folder)
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoints.newest(folder / "checkpoints", pytest.fail)
    assert found is not None
    return checkpoints.load(found).tensors


def same(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    best = saving.load(first / "model").state_dict(), saving.load(second / "model").state_dict()
    assert all(torch.equal(best[0][name], best[1][name]) for name in best[1])
    assert lines(first) == lines(second)


def test_it_learns_to_copy(tmp_path: Path) -> None:
    task, settings = Copy(symbols=4, words=2), TrainingSettings(steps=300, lr=1e-2, evaluation_batches=2)
    outcome = train(task, small(task, positions="learned", width=32), settings, tmp_path)
    assert outcome.status == "complete"
    assert outcome.step == 300
    assert outcome.best is not None
    assert outcome.best > 0.95
    first, last = (line["loss"] for line in (lines(tmp_path)[1], [x for x in lines(tmp_path) if "loss" in x][-1]))
    assert last < 0.3 * first
    kept = steps.evaluate(saving.load(tmp_path / "model"), task, settings, ALONE)
    assert kept.value == outcome.best


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_log(tmp_path: Path) -> None:
    """Every number of the log, step by step; a run that goes on adds to it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = replace(SETTINGS, steps=6, log_every=2, evaluate_every=3)
    train(TASK, small(), settings, tmp_path)
    train(TASK, small(), replace(settings, steps=8), tmp_path, resume=True)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    log = journal.read(tmp_path)
    for name in ("loss", "rate", "norm", "valid"):
        wanted = [(line["step"], line[name]) for line in log if name in line]
        found = [(event.step, event.value) for event in board.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in wanted]
        assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-6)


def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    """200 steps are 100, a kill in the middle of things, and 100 more: weights, best model and log."""
    settings = replace(SETTINGS, steps=200, accumulate=1, save_every=50)
    train(TASK, DROPPING, settings, tmp_path / "whole")

    def kill(line: dict[str, Any]) -> None:
        if line.get("step", 0) >= 108:
            raise Ended

    with pytest.raises(Ended):
        train(TASK, DROPPING, settings, tmp_path / "parts", watch=kill)
    torch.manual_seed(99)
    said: list[Any] = []
    outcome = train(TASK, DROPPING, settings, tmp_path / "parts", resume=True, watch=said.append)
    assert any("step_100" in line.get("message", "") for line in said)
    assert outcome.step == 200
    same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("micro", [2, 7, 8, 34, 35, 38])
def test_a_signal_ends_it_between_two_batches_and_nothing_is_lost(tmp_path: Path, micro: int) -> None:
    """Whether it comes at a first or second batch of a step, or inside an evaluation."""

    class Interrupting(Copy):
        seen = 0

        def batch(self, split: Split, index: int, size: int) -> Batch:
            type(self).seen += 1
            if self.seen == micro:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().batch(split, index, size)

        def __repr__(self) -> str:
            return repr(TASK)

    before, settings = signal.getsignal(signal.SIGTERM), replace(SETTINGS, steps=18, evaluation_batches=4)
    train(TASK, DROPPING, settings, tmp_path / "whole")
    outcome = train(Interrupting(symbols=4, words=3), DROPPING, settings, tmp_path / "parts")
    assert outcome.status == "interrupted"
    assert outcome.step < 18
    assert Interrupting.seen - micro <= 1, "it went on after the signal"
    assert signal.getsignal(signal.SIGTERM) is before
    train(TASK, DROPPING, settings, tmp_path / "parts", resume=True)
    same(tmp_path / "parts", tmp_path / "whole")


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = """
import os, signal, time
from fast_attention.training.signals import Signals
with Signals() as signals:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.05)
    print(signals.caught, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.strip() == "SIGUSR1"
    assert run.returncode == 128 + signal.SIGINT
    assert time.monotonic() - began < 25


def test_a_second_signal_leaves_a_terminal_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True, fileno=lambda: 2))
    monkeypatch.setattr(os, "write", lambda _, words: written.append(words))
    monkeypatch.setattr(os, "_exit", lambda code: written.append(b"%d" % code))
    with Signals() as signals:
        signals.caught = "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
    assert written == [b"\x1b[?25h", b"130"]


def test_outside_the_main_thread_it_trains_without_handlers(tmp_path: Path) -> None:
    found: list[Outcome] = []
    settings = replace(SETTINGS, steps=2)
    thread = threading.Thread(target=lambda: found.append(train(TASK, small(), settings, tmp_path)))
    thread.start()
    thread.join()
    assert found[0].status == "complete"


class Halves(Copy):
    """Two batches that are the halves of one, with unequal numbers of targets."""

    def batch(self, split: Split, index: int, size: int) -> Batch:
        whole = super().batch(split, index // 2, 2 * size)
        whole.targets[: size // 2] = IGNORED
        part = slice(index % 2 * size, (index % 2 + 1) * size)
        return Batch(whole.tokens[part], whole.targets[part])

    def __repr__(self) -> str:
        return repr(TASK)  # from which the numbers are drawn


class Joined(Halves):
    """Both halves at once."""

    def batch(self, split: Split, index: int, size: int) -> Batch:
        parts = [super(Joined, self).batch(split, 2 * index + i, size // 2) for i in (0, 1)]
        return Batch(*(torch.cat(pair) for pair in list(zip(*parts, strict=True))[:2]))


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    losses = []
    for kind, size, parts in ((Halves, 4, 2), (Joined, 8, 1)):
        settings = replace(SETTINGS, steps=12, batch_size=size, accumulate=parts, log_every=1)
        train(kind(symbols=4, words=3), small(), settings, tmp_path / kind.__name__)
        losses.append([line["loss"] for line in lines(tmp_path / kind.__name__) if "loss" in line])
    assert len(losses[0]) == 12
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=1e-6)


SPREAD = """
import os, signal, sys
from tests.training.test_training import STOPPING, SPREAD_SETTINGS, Uneven, small
from fast_attention.training.loop import train
from dataclasses import replace
ports = sys.argv[2:]
for kind in ("ddp", "fsdp"):
    for stop in (13, -1):
        os.environ["MASTER_PORT"] = ports.pop()  # a group's store may still be closing
        task = Uneven(symbols=4, words=3)
        if os.environ["RANK"] == "1":
            STOPPING.append(stop)
        settings = replace(SPREAD_SETTINGS, fsdp=kind == "fsdp")
        outcome = train(task, small(task, mechanism=MIXED), settings, f"{sys.argv[1]}/{kind}", resume=True)
        print(kind, outcome.status, outcome.step, flush=True)
"""
MIXED = ("FavorPlus(num_features=8)", "Softmax()")
SPREAD_SETTINGS = replace(SETTINGS, steps=12, batch_size=6, evaluate_every=5, log_every=1)
STOPPING: list[int] = []  # the last number is the batch at which this process gets a signal


class Uneven(Halves):
    """The processes' shares have unequal numbers of targets."""

    def batch(self, split: Split, index: int, size: int) -> Batch:
        found = Copy.batch(self, split, index, size)
        found.targets[::4] = IGNORED
        if split == "train" and STOPPING and index == STOPPING[-1]:
            os.kill(os.getpid(), signal.SIGTERM)
        return found


def free_ports(count: int) -> list[str]:
    """Different ones: all are held until the last is found."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """With copied and with sharded weights; one process is told to stop, and both do; then they go on."""
    task = Uneven(symbols=4, words=3)
    train(task, small(task, mechanism=MIXED), SPREAD_SETTINGS, tmp_path / "one")
    ports = free_ports(4)
    runs = []
    for rank in ("0", "1"):
        words = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **words, "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-c", SPREAD.replace("MIXED", repr(MIXED)), str(tmp_path), *ports]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        runs.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).parent.parent.parent, **pipes))
    try:
        told = [run.communicate(timeout=100) for run in runs]
    finally:
        for run in runs:
            run.kill()  # one that waits for the other would wait for long
    assert all(run.returncode == 0 for run in runs), told
    expected = [f"{kind} {end}" for kind in ("ddp", "fsdp") for end in ("interrupted 6", "complete 12")]
    assert [out.splitlines() for out, _ in told] == [expected] * 2
    one, mine = lines(tmp_path / "one"), weights(tmp_path / "one")
    for two in (tmp_path / "ddp", tmp_path / "fsdp"):
        assert [line["step"] for line in one] == [line["step"] for line in lines(two)]
        for name in ("loss", "valid", "valid_loss", "norm"):
            ours, theirs = ([line[name] for line in log if name in line] for log in (one, lines(two)))
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-6)
        assert mine.keys() == weights(two).keys()
        assert all(torch.allclose(mine[name], x, atol=1e-4) for name, x in weights(two).items())


def test_the_rate_rises_in_a_line_and_falls_to_zero() -> None:
    settings = TrainingSettings(steps=100, lr=1.0, warmup=0.1)
    rates = [steps.rate(settings, step, 0.0) for step in range(100)]
    top = rates.index(max(rates))
    assert 8 <= top <= 11
    assert rates[:9] == sorted(rates[:9])
    assert rates[4] == pytest.approx(0.5, abs=0.01)
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[54] == pytest.approx(0.5, abs=0.02)
    assert 0 < rates[-1] < 1e-3
    timed = TrainingSettings(steps=0, minutes=2.0, lr=1.0, warmup=0.1)
    assert steps.rate(timed, 999, 6.0) == pytest.approx(0.5)
    assert steps.rate(timed, 0, 66.0) == pytest.approx(0.5)
    assert steps.rate(timed, 0, 121.0) == 0.0


def test_a_run_by_time_ends_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = train(TASK, small(), replace(SETTINGS, steps=0, minutes=0.01), tmp_path)
    assert outcome.status == "complete"
    assert 0.6 <= outcome.seconds < 3.0
    assert time.monotonic() - began < 5.0
    assert outcome.step > 0


def test_minutes_of_processor_time_leave_out_what_others_take(tmp_path: Path) -> None:
    waited = iter((2.0,))
    settings = replace(SETTINGS, steps=0, minutes=0.005, clock="processor")
    outcome = train(TASK, small(), settings, tmp_path, watch=lambda line: time.sleep(next(waited, 0.0)))
    assert outcome.status == "complete"
    assert 0.3 <= outcome.seconds < 2.0
    speeds = [line["step_seconds"] for line in journal.read(tmp_path) if "step_seconds" in line]
    assert all(seconds * SETTINGS.log_every < 2.0 for seconds in speeds)


def test_it_stops_when_nothing_improves_and_keeps_the_best(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=400, lr=0.0, evaluate_every=2, patience=3)
    outcome = train(TASK, small(), settings, tmp_path)
    assert outcome.status == "stopped early"
    assert outcome.step == 6
    assert outcome.best_step == 0
    again = train(TASK, small(), settings, tmp_path, resume=True)
    assert again._replace(seconds=0) == outcome._replace(seconds=0)


def test_a_loss_that_is_no_number_is_one_line_and_never_saved(tmp_path: Path) -> None:
    settings = replace(SETTINGS, lr=1e30, warmup=0.0, clip=0.0, save_every=1, weight_decay=0.0)
    with pytest.raises(Diverged, match="smaller lr") as found:
        train(TASK, small(), settings, tmp_path)
    assert "\n" not in str(found.value)
    for path in checkpoints.find_all(tmp_path / "checkpoints"):
        assert all(x.isfinite().all() for x in checkpoints.load(path).tensors.values())


def test_scores_in_every_metric() -> None:
    settings = replace(SETTINGS, evaluation_batches=3)
    model = Model(small())
    for parameter in model.parameters():
        parameter.data.zero_()
    model.out.bias.data[2] = 1.0  # always symbol 2
    targets = torch.cat([TASK.batch("valid", i, 4).targets.flatten() for i in range(3)])
    targets = targets[targets != IGNORED]
    loss = torch.nn.functional.cross_entropy(model.out.bias.detach().expand(len(targets), -1), targets).item()
    expected = {"accuracy": (targets == 2).float().mean().item(), "nats": loss, "bits per byte": loss / math.log(2)}
    for metric, value in expected.items():
        kind = type("Named", (Copy,), {"metric": metric, "__repr__": lambda task: repr(TASK)})
        score = steps.evaluate(model, kind(symbols=4, words=3), settings, ALONE)
        assert score.value == pytest.approx(value, abs=1e-6)
        assert score.loss == pytest.approx(loss, abs=1e-6)
    assert model.training
    assert steps.better(TASK, 0.2, 0.1)
    assert not steps.better(kind(), 0.2, 0.1)


def test_classes_and_half_precision(tmp_path: Path) -> None:
    task = ListOps(shortest=10, longest=30)
    settings = replace(SETTINGS, steps=4, precision="bfloat16")
    outcome = train(task, small(task), settings, tmp_path)
    assert outcome.valid is not None
    assert 0.0 <= outcome.valid <= 1.0
    assert all(x.dtype == torch.float32 for x in weights(tmp_path).values() if x.is_floating_point())


def test_only_matrices_are_pulled_to_zero() -> None:
    model = Model(small(positions="learned"))
    pulled, free = steps.optimiser_for(model, SETTINGS).param_groups
    assert pulled["weight_decay"] == SETTINGS.weight_decay
    assert free["weight_decay"] == 0.0
    assert len(pulled["params"]) + len(free["params"]) == len(list(model.parameters()))
    assert {id(p) for p in free["params"]} >= {id(model.places.table), id(model.norm.weight), id(model.out.bias)}
    assert all(p.ndim > 1 for p in pulled["params"])


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        (TASK, {"causal": False}, "asks for what comes next"),
        (TASK, {"max_len": 5, "positions": "learned"}, "max_len=5"),
        (Copy(), {"vocab_size": 4}, "vocab_size=4"),
        (ListOps(), {"head": "tokens", "classes": 0}, "classes"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(task: Any, settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small(task, **settings)


def test_a_run_is_not_written_over_nor_mixed_with_another(tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=2)
    train(TASK, small(), settings, tmp_path)
    with pytest.raises(ValueError, match="holds a run"):
        train(TASK, small(), settings, tmp_path)
    task = Duplicate(symbols=3, words=3)
    for other in (
        (task, small(task), settings),
        (TASK, small(mechanism="LinearAttention()"), settings),
        (TASK, small(), replace(settings, batch_size=5)),
    ):
        with pytest.raises(ValueError, match="holds a run with"):
            train(*other, tmp_path, resume=True)
    assert train(TASK, small(), replace(settings, steps=5), tmp_path, resume=True).step == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[training]\nstep = 5", "'step'; did you mean 'steps'"),
        ("[model]\nwidht = 5", "'widht'; did you mean 'width'"),
        ("[trainings]", "did you mean 'training'"),
        ("training = 3", "must be a table"),
        ("[training", "Expected"),
        ("[training]\nzzzzz = 1", "there are: steps"),
    ],
)
def test_a_wrong_file_of_settings_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as found:
        from_toml(path)
    assert str(path) in str(found.value)
    assert "\n" not in str(found.value)
    with pytest.raises(ValueError, match="No such file"):
        from_toml(tmp_path / "none.toml")


def test_a_file_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[training]\nsteps = 7\nlr = 1e-3\n[model]\nmechanism = ["Softmax", "FNet"]\n')
    assert from_toml(path) == ({"steps": 7, "lr": 1e-3}, {"mechanism": ["Softmax", "FNet"]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"steps": -1},
        {"keep": 1},
        {"lr": "fast"},
        {"warmup": 1.0},
        {"precision": "float8"},
        {"clip": -1},
        {"clock": "sun"},
        {"clock": "processor", "device": "cuda"},
    ],
)
def test_settings_that_make_no_sense(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"TrainingSettings\\({next(iter(wrong))}"):
        TrainingSettings(**wrong)
    assert json.loads(json.dumps(asdict(TrainingSettings())))["keep"] == 2
