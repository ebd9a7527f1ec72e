"""Folders of runs with damage of any kind: a run goes on to the bit from what is sound, or is refused untouched."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fast_attention.nn import saving
from fast_attention.tasks.recall import Copy
from fast_attention.training import checkpoints, journal, steps
from fast_attention.training.loop import train
from fast_attention.training.settings import TrainingSettings
from tests.fuzz.kit import fuzz

TASK = Copy(symbols=3, words=2)
CONFIG = steps.config_for(TASK, width=8, heads=2, layers=1, dropout=0.1)
SETTINGS = TrainingSettings(
    steps=7, batch_size=2, evaluate_every=3, evaluation_batches=1, log_every=1, save_every=2, save_seconds=0.0, keep=3
)


class Killed(Exception):
    pass


class Runs(NamedTuple):
    """A run that was killed at step 6, and what it comes to."""

    killed: Path
    weights: dict[str, Tensor]
    log: list[dict[str, Any]]


def told(folder: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second", "step_seconds")
    return [{k: v for k, v in line.items() if k not in timed} for line in journal.read(folder)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    whole, killed = (tmp_path_factory.mktemp(name) for name in ("whole", "killed"))
    train(TASK, CONFIG, SETTINGS, whole)

    def kill(line: dict[str, Any]) -> None:
        if line["step"] == 7:
            raise Killed

    with pytest.raises(Killed):
        train(TASK, CONFIG, SETTINGS, killed, watch=kill)
    assert [path.name for path in checkpoints.find_all(killed / "checkpoints")] == ["step_6", "step_4", "step_2"]
    return Runs(killed, saving.read(whole / "checkpoints" / "step_7")[1], told(whole))


HURT = st.tuples(
    st.integers(0, 10**6),  # which file
    st.sampled_from(["flip", "flip", "flip", "cut", "delete", "empty", "garbage", "swap"]),
    st.integers(0, 10**9),  # where
    st.binary(min_size=1, max_size=40),
)


def hurt(folder: Path, which: int, kind: str, where: int, garbage: bytes) -> None:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and "tensorboard" not in path.parts]
    path = found[which % len(found)]
    text = bytearray(path.read_bytes())
    at = where % max(len(text), 1)
    if kind == "flip" and text:
        text[at] ^= 1 << where % 8
    elif kind == "cut":
        del text[at:]
    elif kind == "empty":
        text.clear()
    elif kind == "garbage":
        text[at : at + len(garbage)] = garbage
    if kind == "delete":
        path.unlink()
    elif kind == "swap":
        other = found[where % len(found)]
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(text)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@fuzz("damaged folders of runs", examples=8, damage=st.lists(HURT, min_size=1, max_size=5))
def test_a_damaged_run_goes_on_to_the_bit_or_is_refused(runs: Runs, damage: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(runs.killed, Path(place) / "run"))
        for each in damage:
            hurt(folder / "checkpoints", *each)
        before = contents(folder)
        try:
            outcome = train(TASK, CONFIG, SETTINGS, folder, resume=True)
        except ValueError:
            assert contents(folder) == before
            return
        assert outcome.step == 7
        found = saving.read(folder / "checkpoints" / "step_7")[1]
        assert all(torch.equal(found[name], x) for name, x in runs.weights.items())
        assert told(folder) == runs.log


def whole(line: dict[str, Any]) -> str:
    return json.dumps(line, sort_keys=True)


@fuzz(
    "damaged logs",
    examples=30,
    damage=st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=12), st.booleans()), min_size=1, max_size=6),
)
def test_a_damaged_log_keeps_its_whole_lines(runs: Runs, damage: list[tuple[int, bytes, bool]]) -> None:
    """Lines that were not touched stay, in order; what was is set aside, every byte of it, or is a line again."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / journal.LOG
        lines = (runs.killed / journal.LOG).read_bytes().splitlines()
        touched = set()
        for where, garbage, replaces in damage:
            number = where % len(lines)
            at = where // len(lines) % (len(lines[number]) + 1)
            lines[number] = lines[number][:at] + garbage + lines[number][at + (len(garbage) if replaces else 0) :]
            touched.add(number)
        log.write_bytes(b"\n".join(lines) + b"\n")
        said: list[str] = []
        kept = [json.loads(line) for number, line in enumerate(lines) if number not in touched]
        assert all(line.pop(journal.CHECK) for line in kept)
        book = journal.Journal(place, 10**9, 10**9, said.append)
        book.close()
        found = [whole(line) for line in journal.read(place)]
        rest = iter(found)
        assert all(whole(line) in rest for line in kept), "whole lines stay in their order"
        aside = Path(place) / journal.DAMAGED
        assert aside.exists() == bool(said)
        if aside.exists():
            assert all(line in b"\n".join(lines) for line in aside.read_bytes().splitlines())
