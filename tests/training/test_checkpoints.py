"""Checkpoints: damage of any kind is found, a full disk harms nothing, a killed run goes on."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fast_attention import files
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.training import checkpoints, journal
from fast_attention.training.checkpoints import Damaged

CONFIG = ModelConfig(vocab_size=7, mechanism="FavorPlus(num_features=4)", width=8, heads=2, layers=1, max_len=8)
KILLS = int(os.environ.get("FAST_ATTENTION_KILLS", "5"))


def save(folder: Path, step: int, keep: int = 3) -> Path:
    torch.manual_seed(step)
    model = Model(CONFIG)
    states = [checkpoints.random_states()]
    optimiser = {"state": {"out.weight": {"step": torch.tensor(float(step))}}, "param_groups": []}
    return checkpoints.save(folder, step, CONFIG, model.state_dict(), optimiser, states, keep=keep, task="Copy()")


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_checkpoint_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    found = checkpoints.load(path)
    torch.manual_seed(4)
    fresh = Model(CONFIG)
    for name, x in fresh.state_dict().items():
        assert torch.equal(found.tensors[name], x), name
    assert found.config == CONFIG
    assert found.manifest["step"] == 4
    assert found.manifest["task"] == "Copy()"
    assert found.manifest["mechanism"] == "FavorPlus(num_features=4)"
    expected = torch.rand(3), random.random()
    checkpoints.set_random_states(found.randomness[0])
    torch.testing.assert_close(torch.rand(3), expected[0], rtol=0, atol=0)
    random.setstate(found.randomness[0]["python"])
    assert found.randomness[0]["numpy"][0] == "MT19937" if "numpy" in sys.modules else True
    assert saving.load(path).config == CONFIG  # a checkpoint is a model's folder too


def test_every_flipped_bit_and_every_truncation_is_found(tmp_path: Path) -> None:
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    names = sorted(contents(path))
    assert set(names) == {*checkpoints.FILES, checkpoints.MANIFEST}
    draw = random.Random(0)
    for trial in range(120):
        file = path / names[trial % len(names)]
        whole = file.read_bytes()
        place = draw.randrange(len(whole))
        if trial < 100:
            hurt = bytearray(whole)
            hurt[place] ^= 1 << draw.randrange(8)
        else:
            hurt = whole[:place]
        file.write_bytes(hurt)
        said: list[str] = []
        assert checkpoints.newest(tmp_path, said.append) == older, (file.name, place)
        assert len(said) == 1
        assert str(path) in said[0]
        assert file.name in said[0]
        with pytest.raises(Damaged):
            checkpoints.load(path)
        file.write_bytes(whole)
    assert checkpoints.newest(tmp_path, pytest.fail) == path


@pytest.mark.parametrize("name", [*checkpoints.FILES, checkpoints.MANIFEST])
def test_a_missing_file_is_found(tmp_path: Path, name: str) -> None:
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    (path / name).unlink()
    said: list[str] = []
    assert checkpoints.newest(tmp_path, said.append) == older
    assert name in said[0]


def test_files_of_two_checkpoints_do_not_mix(tmp_path: Path) -> None:
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    shutil.copy(older / "model.safetensors", path / "model.safetensors")
    assert checkpoints.newest(tmp_path, lambda words: None) == older


def test_the_newest_are_kept_by_number(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=2)
    assert [path.name for path in checkpoints.find_all(tmp_path)] == ["step_11", "step_10"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11"]


@pytest.mark.parametrize("moment", range(6))
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    before = contents(save(tmp_path, 1))
    calls, sync = [0], files.sync

    def full(path: Path) -> None:
        calls[0] += 1
        if calls[0] > moment:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(OSError, match=r"step_2 could not be written: No space left.*step_1 before it") as found:
        save(tmp_path, 2)
    assert found.value.errno == errno.ENOSPC
    assert "\n" not in str(found.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert contents(tmp_path / "step_1") == before


@pytest.mark.skipif(os.name != "posix", reason="limits are POSIX's")
def test_a_write_that_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    """A limit on the size of files: the refusal comes from the system, through safetensors, not from a patch."""
    import resource

    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"step_2 could not be written: .*; step_1 before it is whole") as found:
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(found.value)
    assert checkpoints.newest(tmp_path, pytest.fail) == tmp_path / "step_1"


RUN = """
import json, os, random, signal, sys, time
from fast_attention.tasks.recall import Copy
from fast_attention.training import checkpoints
from fast_attention.training.loop import train
from fast_attention.training.settings import TrainingSettings
from fast_attention.training.steps import config_for
folder, kills = sys.argv[1], int(sys.argv[2])
task, draw = Copy(symbols=4, words=3), random.Random(1)
config = config_for(task, mechanism="FavorPlus(num_features=4)", width=8, heads=2, layers=1, dropout=0.1)
settings = TrainingSettings(steps=100_000, batch_size=4, evaluate_every=7, evaluation_batches=1, save_every=2)
for _ in range(kills):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        tell = lambda line: os.write(writing, (json.dumps(line) + chr(10)).encode())
        train(task, config, settings, folder, resume=True, watch=tell)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as told:
        first = [json.loads(told.readline()) for _ in range(2)]
        time.sleep(draw.random() * 0.4)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    damaged = []
    last = checkpoints.newest(folder + "/checkpoints", damaged.append)
    step = checkpoints.load(last).manifest["step"] if last else 0
    print(json.dumps({"first": first, "killed": os.WTERMSIG(status), "damaged": damaged, "step": step}), flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is POSIX's")
def test_a_run_killed_at_any_moment_goes_on(tmp_path: Path) -> None:
    """``FAST_ATTENTION_KILLS=50`` makes it the long form."""
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), str(KILLS)], env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True, capture_output=True, timeout=60 + 5 * KILLS, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found, reached = [json.loads(line) for line in run.stdout.splitlines()], 0
    assert len(found) == KILLS
    for each in found:
        assert each["killed"] == signal.SIGKILL, run.stderr
        assert not each["damaged"]
        assert reached == 0 or int(each["first"][0]["message"].rpartition("step_")[2]) >= reached, each
        assert each["first"][1]["step"] >= reached
        assert each["step"] >= reached, "steps that were saved are lost"
        reached = each["step"]
    assert reached > 0
    trained = [line["step"] for line in journal.read(tmp_path) if "loss" in line]
    assert trained == list(range(10, trained[-1] + 1, 10)), "every step is in the log once"
