"""The settings of a training run, as one frozen value, and their TOML files."""

from __future__ import annotations

import difflib
import os
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from fast_attention.data import reading
from fast_attention.nn.models import ModelConfig
from fast_attention.value import Value, at_least, is_seed, one_of

Precision = Literal["float32", "bfloat16"]
Clock = Literal["wall", "processor"]


@dataclass(frozen=True, repr=False)
class TrainingSettings(Value):
    """The settings of a training run: steps, batch size, optimiser, evaluation, checkpoints.

    Args:
        steps: Training steps; 0 for no limit but ``minutes``.
        minutes: Time to spend, evaluations included; 0 for no limit but ``steps``.
        clock: What counts time. ``"processor"`` counts what this process's threads compute on a CPU, so that a machine
            that others use too gives nobody fewer steps; threads that wait for each other may count as well.
        batch_size: Sequences in a batch, over all processes.
        accumulate: Batches whose gradients make one step.
        lr: The highest learning rate.
        warmup: Fraction of the run in which the rate rises to it; in the rest it falls to zero along a cosine.
        weight_decay: AdamW's, on matrices; not on norms, biases and learned positions.
        clip: The largest norm of a gradient; 0 for no limit.
        precision: ``"bfloat16"`` computes under autocast; weights and their updates stay in float32.
        evaluate_every: Steps between evaluations.
        evaluation_batches: Batches of the fixed validation set.
        patience: Evaluations without a new best after which training stops; 0: never.
        log_every: Steps between lines in the log.
        seed: For the weights and for dropout; the data has its own, in the task.
        order: The number of the order of the training data: another number gives other batches.
        save_every: Steps between checkpoints; 0 for none by steps.
        save_seconds: Seconds between checkpoints; 0 for none by time. One is always written at the end.
        keep: Checkpoints kept, at least 2.
        device: Where to compute, such as ``"cpu"`` or ``"cuda"``.
        fsdp: Under ``torchrun``, shard the weights over the processes (FSDP2) instead of copying them (DDP).
        sequence_parallel: Processes that hold one sequence, each some of its tokens; of all processes it is a divisor,
            and as many groups as are left share the batch.
    """

    steps: int = 1000
    minutes: float = 0.0
    clock: Clock = "wall"
    batch_size: int = 32
    accumulate: int = 1
    lr: float = 2e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: Precision = "float32"
    evaluate_every: int = 100
    evaluation_batches: int = 8
    patience: int = 0
    log_every: int = 10
    seed: int = 0
    order: int = 0
    save_every: int = 0
    save_seconds: float = 120.0
    keep: int = 2
    device: str = "cpu"
    fsdp: bool = False
    sequence_parallel: int = 1

    def __post_init__(self) -> None:
        for setting in ("steps", "patience", "save_every"):
            at_least(self, setting, getattr(self, setting), 0)
        for setting in ("seed", "order"):
            is_seed(self, setting, getattr(self, setting))
        for setting in (
            "batch_size",
            "accumulate",
            "evaluate_every",
            "evaluation_batches",
            "log_every",
            "sequence_parallel",
        ):
            at_least(self, setting, getattr(self, setting), 1)
        for setting in ("minutes", "lr", "weight_decay", "clip", "save_seconds"):
            at_least(self, setting, getattr(self, setting), 0.0)
        at_least(self, "keep", self.keep, 2)
        at_least(self, "warmup", self.warmup, 0.0)
        one_of(self, "precision", self.precision, Precision)
        one_of(self, "clock", self.clock, Clock)
        if self.clock == "processor" and not str(self.device).startswith("cpu"):
            raise ValueError(f"TrainingSettings(clock='processor', device={self.device!r}): it counts CPUs only")
        if self.warmup >= 1.0:
            raise ValueError(f"TrainingSettings(warmup={self.warmup!r}): warmup is a fraction of the run, below 1")
        if not self.steps and not self.minutes:
            raise ValueError("TrainingSettings(steps=0, minutes=0.0): give steps or minutes, or training has no end")

    def read_clock(self) -> float:
        """Seconds of the clock, from any start."""
        return time.process_time() if self.clock == "processor" else time.monotonic()

    def done(self, step: int, seconds: float) -> float:
        """The finished fraction of the run: by steps or by time, whichever is further."""
        by_steps = step / self.steps if self.steps else 0.0
        return max(by_steps, seconds / (60 * self.minutes) if self.minutes else 0.0)


def from_toml(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a file's tables ``[training]`` and ``[model]``: settings by name, checked to exist.

    Raises:
        ValueError: The file cannot be read, is no TOML, or names a setting that does not exist; the nearest is named.
    """
    try:
        tables = tomllib.loads(reading.raw(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)}: {getattr(error, 'strerror', None) or error}") from error
    _known(path, "table", tables, ("training", "model"))
    both = [tables.get(name, {}) for name in ("training", "model")]
    for name, table, kind in zip(("training", "model"), both, (TrainingSettings, ModelConfig), strict=True):
        if not isinstance(table, dict):
            raise ValueError(f"{os.fspath(path)}: {name} must be a table, [{name}], with a setting on each line")
        _known(path, f"setting of [{name}]", table, [field.name for field in fields(kind)])
    training, model = both
    return training, model


def _known(path: str | os.PathLike[str], what: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    names = list(names)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
            raise ValueError(f"{os.fspath(path)}: no {what} is called {name!r}; {hint}")
