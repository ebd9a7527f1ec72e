"""Runs a study: one training run after the other, each resumed where it was stopped."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fast_attention import counting
from fast_attention.lab.study.plan import Plan, folder, matched
from fast_attention.lab.study.record import Result, Study
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks.task import Task
from fast_attention.training import by_position, journal, loop, run_folder, steps
from fast_attention.training.processes import Group
from fast_attention.training.settings import TrainingSettings

CELLS = "cells"  # the folder of the runs
Watch = Callable[[str, dict[str, Any]], None]


def study(plan: Plan, record: Study, out: Path, watch: Watch) -> str:
    """Fill the record, and return how that ended.

    Args:
        plan: What to train.
        record: Where results go; those that it has are not made again.
        out: The study's folder.
        watch: Called with a cell's name and the lines of its log; at a cell's end with its result, to be kept: the
            cell's checkpoints are deleted then.
    """
    done = {(r.mechanism, r.seed) for r in record.results}
    for mechanism, seed in plan.cells:
        cell = out / CELLS / folder(mechanism, seed)
        if (mechanism, seed) not in done:
            result = _cell(plan, mechanism, seed, cell, watch)
            if result is None:
                return "interrupted"
            record.results.append(result)
            watch(mechanism, {"result": result})
        shutil.rmtree(cell / run_folder.CHECKPOINTS, ignore_errors=True)  # the record has it now, the folder its model
    return "complete"


def _cell(plan: Plan, mechanism: str, seed: int, out: Path, watch: Watch) -> Result | None:
    settings = plan.settings_for(seed)
    config = matched(plan.task, mechanism, plan.model)
    try:
        outcome = loop.train(
            plan.task, config, settings, out, resume=True, restart=True,
            watch=lambda line: watch(f"{mechanism} seed {seed}", line),
        )  # fmt: skip
    except loop.Diverged:
        return Result(mechanism, seed, "failed", None, None, 0, 0.0, 0, 0, config.hidden)
    if outcome.status == "interrupted":
        return None
    lines = journal.read(out)
    times = [line["step_seconds"] for line in lines if "step_seconds" in line]
    return Result(
        mechanism, seed, outcome.status, outcome.valid, outcome.best, outcome.step,
        statistics.median(times) if times else outcome.seconds / max(outcome.step, 1),
        peak(plan.task, config, settings), outcome.parameters, config.hidden,
        [(line["step"], line["seconds"], line["valid"]) for line in lines if "valid" in line],
        _by_position(plan.task, settings, out / run_folder.MODEL),
    )  # fmt: skip


def _by_position(task: Task, settings: TrainingSettings, folder: Path) -> list[tuple[int, int, float]]:
    if not by_position.applies(task):
        return []
    group = Group(0, 1, torch.device(settings.device))
    return by_position.loss_by_position(saving.load(folder, group.device), task, settings, group)


def peak(task: Task, config: ModelConfig, settings: TrainingSettings) -> int:
    """The most bytes that the tensors of one forward and backward pass hold at once, gradients included."""
    with torch.random.fork_rng(devices=[]):
        model = Model(config).to(settings.device).train()
        batch = task.batch("train", 0, settings.batch_size)
        batch = batch.to(settings.device)
        return counting.peak_bytes(lambda: steps.loss_of(model, batch, settings).backward(), settings.device)
