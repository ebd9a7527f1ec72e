"""What stands in a run's folder: the checkpoint to resume from, what it was trained with, what may be overwritten."""

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
FIXED = ("batch_size", "accumulate", "seed", "order")  # what a resumed run cannot change: the data's order hangs on it


class Run(NamedTuple):
    """What a run is of, as its newest intact checkpoint says."""

    task: str  # its expression
    settings: dict[str, Any]
    config: ModelConfig


def begin(
    out: str | os.PathLike[str], *, resume: bool, restart: bool, say: Callable[[str], None] = print
) -> Path | None:
    """The checkpoint to resume from, or None to begin.

    Results are only cleared away where ``restart`` is set: without ``resume`` always, with it where nothing is intact.

    Args:
        out: The run's folder.
        resume: Go on from the newest intact checkpoint.
        restart: Begin anew over what stands there.
        say: Told of damaged checkpoints that are passed over.

    Raises:
        ValueError: There are results and neither may they be overwritten nor is there anything to resume from.
        Newer: A later version of this library wrote the newest checkpoint; it is left as it is.
    """
    out = Path(out)
    if resume and (path := checkpoints.newest(out / CHECKPOINTS, say)) is not None:
        return path
    found = _results(out)
    if found and not restart:
        anew = "--restart (restart=True) begins anew over them; or choose another folder"
        if resume:
            raise ValueError(f"{out} holds {found} and no intact checkpoint to resume from: {anew}")
        raise ValueError(f"{out} holds a run ({found}): resume it (--resume); {anew}")
    for name in (CHECKPOINTS, MODEL) if found else ():
        shutil.rmtree(out / name, ignore_errors=True)
    if found:
        (out / journal.LOG).unlink(missing_ok=True)
    return None


def _results(out: Path) -> str:
    """What would be lost if a run began anew; empty for nothing, or a model that has seen no step."""
    kept = [path.name for path in checkpoints.every(out / CHECKPOINTS)]
    last = max((line["step"] for line in journal.read(out)), default=0)
    found = [f"the checkpoints {', '.join(kept)}"] if kept else []
    found += [f"a log up to step {last}"] if last else []
    found += ["a model"] if (out / MODEL / "config.json").exists() and not (out / journal.LOG).exists() else []
    return " and ".join(found)


def of(out: str | os.PathLike[str], say: Callable[[str], None] = print) -> Run | None:
    """What the run in a folder was trained with; None where there is no intact checkpoint.

    Raises:
        Newer: A later version of this library wrote the newest checkpoint.
    """
    path = checkpoints.newest(Path(out) / CHECKPOINTS, say)
    if path is None:
        return None
    manifest = checkpoints.verify(path)
    return Run(manifest["task"], manifest["settings"], saving.read(path)[0])


def check(run: Run, out: Path, task: Task, config: ModelConfig, settings: TrainingSettings) -> None:
    """Raise a ``ValueError`` that names every difference which a resumed run cannot have."""
    theirs: dict[str, Any] = {"task": run.task, **{name: run.settings[name] for name in FIXED}}
    ours: dict[str, Any] = {"task": repr(task), **{name: getattr(settings, name) for name in FIXED}}
    if run.config != config:
        names = [field.name for field in fields(config)]
        theirs |= {name: asdict(run.config)[name] for name in names}
        ours |= {name: asdict(config)[name] for name in names}
    other = [f"{name} {theirs[name]}, not {ours[name]}" for name in theirs if theirs[name] != ours[name]]
    if other:
        raise ValueError(f"{out} holds a run with {'; '.join(other)}: it cannot be resumed so")
