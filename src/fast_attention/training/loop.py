"""The training loop: batch number i at step i, so that a killed run resumes from its checkpoint, equal to the bit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from fast_attention import files
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks.task import Task
from fast_attention.training import checkpoints, processes, run_folder, steps
from fast_attention.training.journal import Journal
from fast_attention.training.processes import Group
from fast_attention.training.settings import TrainingSettings
from fast_attention.training.signals import Signals

Watch = Callable[[dict[str, Any]], None]
ORDER = 1 << 32  # batch numbers of one order of the data
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Outcome(NamedTuple):
    """How a run ended."""

    status: str  # "complete", "stopped early" or "interrupted"
    step: int
    seconds: float
    best: float | None  # in the task's metric; the model of that step is kept
    best_step: int
    valid: float | None  # at the last evaluation
    parameters: int


class Diverged(ArithmeticError):
    """The loss or its gradient is not finite."""


class _Stopped(Exception):
    """Raised when a signal asked to stop, in this process or another."""


@dataclass
class _Progress:
    """The progress of a run, without tensors and generators; saved in a checkpoint's manifest."""

    step: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = -1
    valid: float | None = None
    evaluated: int = -1  # the step of the last evaluation
    stale: int = 0  # evaluations since the best one


def train(
    task: Task, config: ModelConfig, settings: TrainingSettings, out: str | os.PathLike[str], *,
    resume: bool = False, restart: bool = False, watch: Watch = lambda line: None,
) -> Outcome:  # fmt: skip
    """Train a model; ``out`` then holds ``model`` (the best one), ``checkpoints`` and ``log.jsonl``.

    Torch's global generator is seeded. Under ``torchrun`` every process calls this with the same arguments and the
    same folder, which all can read.

    Args:
        task: What to learn.
        config: The model; see ``steps.config_for``.
        settings: How to train.
        out: The run's folder.
        resume: Continue from the newest intact checkpoint in ``out``, or begin where there are no results.
        restart: Begin anew over the results in ``out``; with ``resume``, only where there is no intact checkpoint.
        watch: Called with each line of the log, and with ``{"message": ...}``, in the process that writes.

    Raises:
        ValueError: The model does not fit the task, ``out`` holds results that must not be overwritten, or another run.
        InUse: Another process trains in ``out``.
        Newer: A later version of this library wrote the newest checkpoint in ``out``, which is left as it is.
        OSError: Something could not be written.
        Diverged: The loss is not finite.
        LostProcess: Another process is gone; what was saved last is whole, and ``resume`` continues from it.
    """
    steps.check(task, config)
    with processes.join(settings.device, settings.sequence_parallel) as group, Signals() as signals:
        if settings.batch_size < group.data:
            raise ValueError(f"batch_size={settings.batch_size} is below the {group.data} groups that share a batch")
        if task.length < group.sequence:
            raise ValueError(f"{task!r} has {task.length} tokens, fewer than sequence_parallel={group.sequence}")
        with files.locked(out) if group.first else nullcontext():
            run = _Run(task, config, settings, Path(out), group, signals, watch if group.first else lambda line: None)
            try:
                run.begin(resume, restart)
                return run.go()
            except RuntimeError as error:
                if group.size == 1 or not processes.lost(error):
                    raise
                raise processes.lost_process(run.out, run.progress.step) from error
            finally:
                run.close()


class _Run:
    def __init__(
        self, task: Task, config: ModelConfig, settings: TrainingSettings, out: Path, group: Group, signals: Signals,
        watch: Watch,
    ) -> None:  # fmt: skip
        self.task, self.config, self.settings = task, config, settings
        self.out, self.group, self.signals, self.watch = out, group, signals, watch
        torch.manual_seed(settings.seed)
        self.model = Model(config).to(group.device).train()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.wrapped = group.wrap(self.model, settings.fsdp)
        self.optimiser = steps.optimiser_for(self.model, settings)
        torch.manual_seed(settings.seed + 1 + group.rank)  # dropout differs between processes
        self.progress, self.saved = _Progress(), (0, -1)  # step and evaluation that were saved last
        self.journal: Journal | None = None
        self.randomness = checkpoints.random_states()  # as they were when the last step ended
        self.rate, self.loss, self.norm = 0.0, torch.zeros(()), torch.zeros(())
        self._restart_clock()

    def begin(self, resume: bool, restart: bool) -> None:
        """Resume from the newest intact checkpoint, if any; open the log."""
        self.task.batch("valid", 0, 1)  # large data are read before the clock starts
        self.data = self.task.describe()
        path = None
        if self.group.first:
            (self.out / processes.LOST).unlink(missing_ok=True)
            path = run_folder.begin(self.out, resume=resume, restart=restart, say=self._message)
        path = self.group.gather(path)[0]
        if path is not None:
            self._load(path)
        if self.group.first:
            if resume:
                self._message(f"resumes from {path}" if path else f"{self.out} holds no checkpoint: begins anew")
            self.journal = Journal(self.out, self.progress.step, self.progress.evaluated, self._message)
        self.start = self.settings.read_clock() - self.progress.seconds
        self.last_save = self.progress.seconds

    def _message(self, words: str) -> None:
        self.watch({"message": words})

    def _load(self, path: Path) -> None:
        checkpoint = checkpoints.load(path)
        run = run_folder.run_of(checkpoint.manifest, checkpoint.config)
        run_folder.check(run, self.out, self.task, self.data, self.config, self.settings)
        state: Any = {"model_state_dict": checkpoint.tensors, "optim_state_dict": checkpoint.optimiser}
        set_state_dict(self.model, self.optimiser, **state, options=StateDictOptions(full_state_dict=True))
        self.progress = _Progress(**checkpoint.manifest["place"])
        self.saved = (self.progress.step, self.progress.evaluated)
        if len(checkpoint.randomness) == self.group.size:
            checkpoints.set_random_states(checkpoint.randomness[self.group.rank])
        else:
            self._message(f"{path} is of {len(checkpoint.randomness)} processes: dropout begins anew")
        self.randomness = checkpoints.random_states()

    def go(self) -> Outcome:
        """Run all steps that are left, with evaluations, lines in the log and checkpoints when they are due."""
        status = "complete"
        try:
            self._evaluate_if(self.progress.step % self.settings.evaluate_every == 0)
            while self.settings.done(self.progress.step, self.progress.seconds) < 1.0 and not self._patience_is_out():
                self._step()
                self._log_if(self.progress.step % self.settings.log_every == 0)
                self._evaluate_if(self.progress.step % self.settings.evaluate_every == 0)
                self._save_if_due()
            self._evaluate_if(True)
            status = "stopped early" if self.settings.done(self.progress.step, self.progress.seconds) < 1.0 else status
        except _Stopped:
            status = "interrupted"
        self._save()
        at = self.progress
        return Outcome(status, at.step, at.seconds, at.best, at.best_step, at.valid, self.parameters)

    def close(self) -> None:
        """Bring the log to the disk."""
        if self.journal is not None:
            self.journal.close()

    def _poll(self) -> None:
        caught, self.progress.seconds = self.group.highest(
            bool(self.signals.caught), self.settings.read_clock() - self.start
        )
        if caught:
            raise _Stopped

    def _step(self) -> None:
        self._poll()
        settings, first = self.settings, self._batch()
        size = settings.batch_size
        batches = [self.task.batch("train", first + i, size) for i in range(settings.accumulate)]
        targets = max(sum(steps.num_targets(batch) for batch in batches), 1)  # of all processes
        self.optimiser.zero_grad(set_to_none=True)
        losses = torch.zeros((), device=self.group.device)
        for batch in batches:
            self._poll()
            with self.group.gradient_sync(self.wrapped, batch is batches[-1]):
                loss = steps.loss_of(self.wrapped, self.group.shard(batch), settings) / targets
                (loss * self.group.size).backward()  # the processes' gradients are averaged
            losses += loss.detach()
        self.rate = steps.rate(settings, self.progress.step, self.progress.seconds)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf)
        self.optimiser.step()
        self.progress.step += 1
        self.loss, self.tokens = losses, self.tokens + sum(steps.tokens_in(batch) for batch in batches)
        self.randomness = checkpoints.random_states()

    def _batch(self) -> int:
        """The number of the next batch."""
        return self.settings.order * ORDER + self.progress.step * self.settings.accumulate

    def _restart_clock(self) -> None:
        self.tokens, self.lap_start, self.lap_step = 0, self.settings.read_clock(), self.progress.step

    def _finite_loss(self) -> tuple[float, float]:
        """Loss and gradient norm of the last step; raises ``Diverged`` if one is not finite."""
        norm: Any = self.norm
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        (loss,), norm = self.group.total(self.loss[None]), float(norm)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise Diverged(
                f"at step {self.progress.step} the loss is {loss} and its gradient's norm {norm}: "
                f"try a smaller lr (it is {self.settings.lr}) or a longer warmup; the last checkpoint is sound"
            )
        return loss, norm

    def _log_if(self, due: bool) -> None:
        if due:
            loss, norm = self._finite_loss()
            spent = max(self.settings.read_clock() - self.lap_start, 1e-9)
            speed, each = self.tokens / spent, spent / max(self.progress.step - self.lap_step, 1)
            self._restart_clock()
            costs = {"tokens_per_second": round(speed, 1), "step_seconds": round(each, 6)}
            self._log({"loss": loss, "rate": self.rate, "norm": norm, **costs})

    def _log(self, line: dict[str, Any]) -> None:
        if self.journal is not None:
            line = {"step": self.progress.step, **line, "seconds": round(self.progress.seconds, 3)}
            self.journal.write(line)
            self.watch(line)

    def _evaluate_if(self, due: bool) -> None:
        if not due or self.progress.evaluated == self.progress.step:
            return
        began, progress = self.settings.read_clock(), self.progress
        score = steps.evaluate(self.model, self.task, self.settings, self.group, self._poll)
        progress.evaluated, progress.valid = progress.step, score.value
        if steps.better(self.task, score.value, progress.best):
            progress.best, progress.best_step, progress.stale = score.value, progress.step, 0
            tensors: Any = get_model_state_dict(self.model, options=FULL)
            if self.group.first:
                saving.write(self.config, tensors, self.out / run_folder.MODEL)
        else:
            progress.stale += 1
        self._log({"valid": score.value, "valid_loss": score.loss, "metric": self.task.metric})
        self.lap_start += self.settings.read_clock() - began  # not part of the speed

    def _patience_is_out(self) -> bool:
        return bool(self.settings.patience) and self.progress.stale >= self.settings.patience

    def _save_if_due(self) -> None:
        by_step = self.settings.save_every and self.progress.step % self.settings.save_every == 0
        wait = self.settings.save_seconds
        if by_step or (wait and self.progress.seconds - self.last_save >= wait):
            self._save()

    def _save(self) -> None:
        present = (self.progress.step, self.progress.evaluated)
        if present == self.saved or not self.progress.step:  # before the first step there is nothing to save
            return
        self._finite_loss()
        tensors, optimiser = cast(Any, get_state_dict(self.model, self.optimiser, options=FULL))
        randomness = self.group.gather(self.randomness)
        self.last_save = self.progress.seconds
        if self.group.first:
            assert self.journal is not None
            self.journal.sync()
            checkpoints.save(
                self.out / run_folder.CHECKPOINTS, self.progress.step, self.config, tensors, optimiser, randomness,
                keep=self.settings.keep, task=repr(self.task), data=self.data, settings=asdict(self.settings),
                place=asdict(self.progress), data_position={"split": "train", "batch": self._batch()},
            )  # fmt: skip
        self.saved = present
