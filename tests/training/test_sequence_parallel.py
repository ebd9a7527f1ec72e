"""Training whose sequences lie on several processes is training on one: losses, checkpoints, loss by position, ends."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.kills import kill_one

from fast_attention import tasks
from fast_attention.nn.models import Model
from fast_attention.training import by_position, checkpoints, processes, steps
from fast_attention.training.journal import read
from fast_attention.training.loop import train
from fast_attention.training.settings import TrainingSettings
from tests.parallel import spread
from tests.training.test_training import free_ports

SETTINGS = TrainingSettings(
    steps=8, batch_size=4, evaluate_every=4, evaluation_batches=2, log_every=1, save_every=3, keep=3
)
MODEL: dict[str, Any] = {"mechanism": ("LinearAttention()", "Local(window=3)"), "width": 16, "heads": 4, "conv": 3}
CLASSES: dict[str, Any] = {"mechanism": "LearnedFeatures(num_features=4)", "width": 16, "heads": 4}
PAIRS = {2: [(2, False)], 4: [(2, False), (2, True), (4, False)]}  # processes: those of one sequence, FSDP


def run(out: Path, sequence: int = 1, fsdp: bool = False, name: str = "copy") -> None:
    task = tasks.parse("Copy(symbols=5, words=4)" if name == "copy" else "ListOps(shortest=8, longest=20)")
    settings = replace(SETTINGS, sequence_parallel=sequence, fsdp=fsdp)
    train(task, steps.config_for(task, **(MODEL if name == "copy" else CLASSES)), settings, out, resume=True)


def positions(sequence: int) -> list[Any]:
    task = tasks.parse("ByteLM(context=70)")
    torch.manual_seed(0)
    with processes.join("cpu", sequence) as group:
        model = Model(steps.config_for(task, **MODEL))
        if sequence > 1:
            group.wrap(model, fsdp=False)
        return by_position.loss_by_position(model, task, replace(SETTINGS, batch_size=2), group)


def be(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}


def process(rank: int, world: int, folder: str, ports: list[str]) -> None:
    be(rank, world)
    left = iter(ports)

    def meet() -> None:
        os.environ["MASTER_PORT"] = next(left)  # a group's store may still be closing

    for sequence, fsdp in PAIRS[world]:
        meet()
        run(Path(folder) / f"{world} {sequence} {fsdp}", sequence, fsdp)
    meet()
    run(Path(folder) / "handed on", 2)
    if world == 2:
        meet()
        torch.save(positions(2), Path(folder) / f"positions {rank}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on one, four and two processes; the last of four is handed on to two, and from them to one."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "one")
    for world, keeps in ((4, 3), (2, 6)):
        spread(process, (world, str(folder), free_ports(5)), world)
        for path in checkpoints.find_all(folder / "handed on" / "checkpoints"):
            if int(path.name[5:]) > keeps:  # as if the run had been stopped there
                shutil.rmtree(path)
    run(folder / "handed on")
    return folder


def numbers(path: Path) -> dict[str, list[float]]:
    lines = read(path)
    return {name: [line[name] for line in lines if name in line] for name in ("loss", "norm", "valid_loss")}


@pytest.mark.parametrize("name", ["2 2 False", "4 2 False", "4 2 True", "4 4 False", "handed on"])
def test_losses_are_those_of_one_process(folder: Path, name: str) -> None:
    one, other = numbers(folder / "one"), numbers(folder / name)
    assert len(one["loss"]) == len(other["loss"]) == 8
    for key, values in one.items():
        torch.testing.assert_close(torch.tensor(other[key]), torch.tensor(values), rtol=1e-6, atol=1e-6)


def with_classes(rank: int, folder: str, port: str) -> None:
    be(rank, 2)
    os.environ["MASTER_PORT"] = port
    run(Path(folder), 2, name="classes")


def test_classes_count_once(tmp_path: Path) -> None:
    run(tmp_path / "one", name="classes")
    spread(with_classes, (str(tmp_path / "two"), *free_ports(1)), 2)
    one, two = (numbers(tmp_path / number) for number in ("one", "two"))
    for key, values in one.items():
        torch.testing.assert_close(torch.tensor(two[key]), torch.tensor(values), rtol=1e-6, atol=1e-6)


def test_checkpoints_are_alike(folder: Path) -> None:
    """The same files, names, sizes and dtypes, whoever wrote them."""
    one, four = (checkpoints.load(folder / name / "checkpoints" / "step_8") for name in ("one", "4 2 True"))
    sizes = [{name: (x.shape, x.dtype) for name, x in each.tensors.items()} for each in (one, four)]
    assert sizes[0] == sizes[1]
    assert all(torch.allclose(x, four.tensors[name], atol=1e-5) for name, x in one.tensors.items())
    assert one.optimiser.keys() == four.optimiser.keys()


def test_loss_by_position(folder: Path) -> None:
    one, two = positions(1), torch.load(folder / "positions 1", weights_only=False)
    assert [row[:2] for row in one] == [row[:2] for row in two] == [(0, 31), (32, 63), (64, 69)]
    torch.testing.assert_close(torch.tensor([row[2] for row in two]), torch.tensor([row[2] for row in one]))


def test_a_killed_process_ends_all_and_the_run_resumes(tmp_path: Path) -> None:
    end = kill_one(tmp_path / "run", 9.0, resume_on=1)
    assert end.is_clean, end
    assert end.resumed, end


def test_numbers_of_processes_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sequence_parallel=2 and there are 1 processes: start a multiple of 2"):
        run(tmp_path, 2)
