"""A run's folder: the checkpoint to resume from, the task and settings of the run, what may be overwritten."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from fast_attention.nn import saving
from fast_attention.nn.models import ModelConfig
from fast_attention.tasks.task import Task
from fast_attention.training import checkpoints, journal
from fast_attention.training.settings import TrainingSettings

CHECKPOINTS, MODEL = "checkpoints", "model"
CURVE, RESULT = "curve.svg", "result.json"  # of a run that came to its end, by the command line
FIXED = ("batch_size", "accumulate", "seed", "order")  # settings that fix the data's order: a resumed run keeps them


class Run(NamedTuple):
    """Task, data, settings and model of a run, from its newest intact checkpoint."""

    task: str  # its expression
    data: dict[str, str]  # what the task says of them; empty of older runs
    settings: dict[str, Any]
    config: ModelConfig


def begin(
    out: str | os.PathLike[str], *, resume: bool, restart: bool, say: Callable[[str], None] = print
) -> Path | None:
    """The checkpoint to resume from, or None to begin.

    Results are deleted only with ``restart``; together with ``resume`` only if no checkpoint is intact.

    Args:
        out: The run's folder.
        resume: Continue from the newest intact checkpoint.
        restart: Begin anew over existing results.
        say: Called with a message about each damaged checkpoint.

    Raises:
        ValueError: There are results and neither may they be overwritten nor is there anything to resume from.
        Newer: A later version of this library wrote the newest checkpoint; it is left as it is.
    """
    out = Path(out)
    if resume:
        checkpoints.settle(out / CHECKPOINTS)
    if resume and (path := checkpoints.newest(out / CHECKPOINTS, say)) is not None:
        return path
    results = _results(out)
    if results and not restart:
        hint = "--restart (restart=True) begins anew over them; or choose another folder"
        if resume:
            raise ValueError(f"{out} holds {results} and no intact checkpoint to resume from: {hint}")
        raise ValueError(f"{out} holds a run ({results}): resume it (--resume); {hint}")
    for name in (CHECKPOINTS, MODEL) if results else ():
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (journal.LOG, CURVE, RESULT) if restart else ():
        (out / name).unlink(missing_ok=True)
    return None


def _results(out: Path) -> str:
    """A list of the results in a folder, in words; empty if there are none, or only a model before its first step."""
    names = [path.name for path in checkpoints.find_all(out / CHECKPOINTS)]
    last_step = max((line["step"] for line in journal.read(out)), default=0)
    results = [f"the checkpoints {', '.join(names)}"] if names else []
    results += [f"a log up to step {last_step}"] if last_step else []
    results += ["a model"] if (out / MODEL / "config.json").exists() and not (out / journal.LOG).exists() else []
    return " and ".join(results)


def of(out: str | os.PathLike[str], say: Callable[[str], None] = print) -> Run | None:
    """Task, settings and model of the run in a folder; None where there is no intact checkpoint.

    Raises:
        Newer: A later version of this library wrote the newest checkpoint.
    """
    path = checkpoints.newest(Path(out) / CHECKPOINTS, say)
    if path is None:
        return None
    return run_of(checkpoints.verify(path), saving.read(path)[0])


def run_of(manifest: dict[str, Any], config: ModelConfig) -> Run:
    """The run of a checkpoint with this manifest and model."""
    return Run(manifest["task"], manifest.get("data", {}), manifest["settings"], config)


def check(
    run: Run, out: Path, task: Task, data: dict[str, str], config: ModelConfig, settings: TrainingSettings
) -> None:  # fmt: skip
    """Raise a ``ValueError`` that names every difference from the run, if it cannot be resumed with these settings."""
    stored: dict[str, Any] = {"task": run.task, **{name: run.settings[name] for name in FIXED}}
    present: dict[str, Any] = {"task": repr(task), **{name: getattr(settings, name) for name in FIXED}}
    stored |= {f"data ({name})": words for name, words in run.data.items()}
    present |= {f"data ({name})": data.get(name) for name in run.data}
    if run.config != config:
        names = [field.name for field in fields(config)]
        stored |= {name: asdict(run.config)[name] for name in names}
        present |= {name: asdict(config)[name] for name in names}
    differences = [f"{name} {stored[name]}, not {present[name]}" for name in stored if stored[name] != present[name]]
    if differences:
        raise ValueError(f"{out} holds a run with {'; '.join(differences)}: it cannot be resumed so")
