"""What the reproductions that train share: runs of equal steps in the time at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.models import Model, ModelConfig
from experiments.reproductions.common import Budget
from experiments.tasks import Task
from experiments.train import Outcome, TrainingSettings, loss_of, optimiser_for, train


class Training(NamedTuple):
    """A model, what it learns, and how."""

    task: Task
    config: ModelConfig
    settings: TrainingSettings

    def run(self, seed: int, out: Path | None = None) -> tuple[Outcome, list[tuple[int, float, float]]]:
        """How training with one seed ends, and its curve: step, seconds, value.

        Raises:
            KeyboardInterrupt: It was stopped.
        """
        curve: list[tuple[int, float, float]] = []

        def watch(line: dict[str, Any]) -> None:
            if "valid" in line:
                curve.append((line["step"], line["seconds"], line["valid"]))

        outcome = train(self.task, self.config, replace(self.settings, seed=seed, order=seed), out, watch=watch)
        if outcome.status == "interrupted":
            raise KeyboardInterrupt
        return outcome, curve

    def step_seconds(self, clock: Callable[[], float]) -> float:
        """Seconds of one training step, the least of a few: what it takes where nothing else runs."""
        with torch.random.fork_rng(devices=[]):
            model = Model(self.config).train()
            optimiser, times = optimiser_for(model, self.settings), []
            batch = self.task.batch("train", 0, self.settings.batch_size)
            for _ in range(4):
                began = clock()
                optimiser.zero_grad(set_to_none=True)
                loss_of(model, batch).backward()
                optimiser.step()
                times.append(clock() - began)
        return min(times[1:])


def equal_steps(budget: Budget, trainings: Iterable[Training], most: int) -> int:
    """The steps with which all runs end in the time, as fast as the machine is now; a stopped run's where it is one.

    A fifth of the time is for evaluations, and for steps that take longer than when they were tried.
    """
    if budget.rows:
        return int(budget.rows[0]["steps"])
    budget.say("timing a few steps of every model")
    together = sum(each.step_seconds(budget.clock) for each in trainings)
    return max(20, min(most, int(0.8 * budget.seconds / together)))
