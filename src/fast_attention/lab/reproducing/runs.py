"""The training runs of a reproduction: how many steps each can have in the time for all, and one of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fast_attention.lab.reproducing.reproduction import Budget
from fast_attention.lab.study import run
from fast_attention.lab.study.plan import Plan
from fast_attention.lab.study.record import Result, Study
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks.task import Task
from fast_attention.training import steps
from fast_attention.training.settings import TrainingSettings

FEWEST = 20  # steps, however little time there is
TRIED = 4  # steps of each model that are timed; the first is warming up
KEPT = 0.8  # of the time is planned with; the rest is for evaluations, and for what takes longer than when it was tried


class Training(NamedTuple):
    """A model, what it learns, and in batches of what size."""

    task: Task
    config: ModelConfig
    settings: TrainingSettings


def equal_steps(budget: Budget, trainings: Iterable[Training], most: int) -> int:
    """The steps with which all runs end in the time, as fast as the machine is now; a stopped run's where it is one.

    Args:
        budget: The time for all runs together.
        trainings: All of these runs.
        most: Steps that are enough.
    """
    if budget.rows:
        return int(budget.rows[0]["steps"])
    budget.watch("timing a few steps of every model")
    together = sum(_seconds(budget, each) for each in trainings)
    return max(FEWEST, min(most, int(KEPT * budget.seconds / together)))


def _seconds(budget: Budget, training: Training) -> float:
    """Of one training step, the least of a few: what it takes where nothing else runs."""
    task, config, settings = training
    with torch.random.fork_rng(devices=[]):
        model = Model(config).to(settings.device).train()
        optimiser = steps.optimiser_for(model, settings)
        batch, times = task.batch("train", 0, settings.batch_size).to(settings.device), []
        for _ in range(TRIED):
            began = budget.clock()
            optimiser.zero_grad(set_to_none=True)
            steps.loss_of(model, batch, settings).backward()
            optimiser.step()
            times.append(budget.clock() - began)
    return min(times[1:])


def trained(task: Task, mechanism: str, seed: int, settings: TrainingSettings, model: dict[str, Any]) -> Result:
    """One run of a study, with as many parameters as exact attention's.

    Raises:
        KeyboardInterrupt: It was stopped.
    """
    every = Plan(task, (mechanism,), 1, settings, model)
    plan, record = Plan(task, (mechanism,), 1, every.settings_for(seed), model), Study({})
    with tempfile.TemporaryDirectory() as folder:
        if run.study(plan, record, Path(folder), lambda *_: None) == "interrupted":
            raise KeyboardInterrupt
    return record.results[0]
