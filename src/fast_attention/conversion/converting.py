"""Runs the stages of a conversion, each of which can be interrupted and resumed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fast_attention import catalogue
from fast_attention.conversion import ablation, adapters, checkpoint, choosing, trained, transfer
from fast_attention.conversion.adapters import Batch, Groups
from fast_attention.conversion.checkpoint import STAGES, Progress, Stage, path_of
from fast_attention.conversion.goals import HeldOutBatch
from fast_attention.conversion.outcome import Conversion
from fast_attention.conversion.settings import ConversionSettings
from fast_attention.conversion.teachers import Teacher
from fast_attention.integrations import crossover
from fast_attention.integrations.crossover import ExactUpTo
from fast_attention.integrations.randomness import restored_generators
from fast_attention.training.loop import Diverged
from fast_attention.training.signals import Signals

Held = Mapping[str, Sequence[HeldOutBatch]]

POINTS = 100  # of a stage's curve of losses
DECAY = 0.95  # of the running mean of losses, per step
BEST = "best:"  # before the names of the best stage's tensors in a checkpoint
BETAS = (0.9, 0.98)  # AdamW's


class _Stopped(Exception):
    """Raised when a signal asked to stop."""


def run(
    model: Any, mechanism: Any, batches: Callable[[int], Batch], held_out: Sequence[Batch] | Groups, *,
    settings: ConversionSettings, keep: Sequence[int], budget: float | None, choosing: Sequence[Batch],
    exact_up_to: ExactUpTo | None, teacher: Teacher, checkpoint: str | os.PathLike[str] | None, resume: bool,
    watch: Callable[[dict[str, Any]], None],
) -> Conversion:  # fmt: skip
    """See ``fast_attention.convert``."""
    groups = adapters.groups_of(held_out)
    if not callable(batches):
        raise ValueError(f"batches is a function of a number, such as lambda i: my_batches[i]; got {type(batches)}")
    if budget is not None and not (isinstance(budget, int | float) and budget >= 1.0):
        raise ValueError(f"budget={budget!r} is a multiple of the original's loss, at least 1, such as 1.02")
    parsed = catalogue.parse(mechanism)
    if exact_up_to is not None:
        crossover.check(exact_up_to)
        crossover.exact_below(parsed, 1)  # which refuses mechanisms that say it themselves
    path = path_of(checkpoint, resume=resume)
    conversion = _Run(model, parsed, batches, settings, keep, budget, exact_up_to, teacher, path, watch)
    with Signals() as signals:
        conversion.signals = signals
        return conversion.run(groups, choosing or [*chain(*groups.values())], resume)


class _Run:
    signals: Signals
    teacher: Teacher

    def __init__(
        self, model: Any, mechanism: Any, batches: Callable[[int], Batch], settings: ConversionSettings,
        keep: Sequence[int], budget: float | None, exact_up_to: ExactUpTo | None, teacher: Teacher, path: Path | None,
        watch: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self.model, self.mechanism, self.batches, self.settings = model, mechanism, batches, settings
        self.budget, self.exact_up_to, self.teacher, self.path, self.watch = budget, exact_up_to, teacher, path, watch
        self.adapter = adapters.of(model)
        self.original = self.adapter.original(model)
        self.requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        mechanisms = {name: repr(bound.mechanism) for name, bound in self.adapter.layers(self.original).items()}
        layers = [*mechanisms]
        for number in keep:
            if not 0 <= number < len(layers):
                raise ValueError(f"keep names layer {number}; the model's layers go from 0 to {len(layers) - 1}")
        kept = {name: "asked for" for i, name in enumerate(layers) if i in keep}
        self.goal = self.adapter.goal(model, settings.distil, teacher)
        with restored_generators(model):
            torch.manual_seed(settings.seed)
            kept |= self.adapter.put(model, mechanism, [name for name in layers if name not in kept])
        model.eval()
        self.result = Conversion(self.goal.name, repr(mechanism), layers, kept, mechanisms)
        self.result.exact_up_to = None if exact_up_to == "auto" else exact_up_to
        self.device, self.progress, self.optimiser = next(model.parameters()).device, Progress(), None
        self.best: dict[str, torch.Tensor] = {}  # the model's state at the best stage, if that is no longer its own
        self.identity = {} if path is None else checkpoint.identity(
            self.original, settings, mechanism=repr(mechanism), exact_up_to=exact_up_to, keep=sorted(keep),
            budget=budget, teacher=teacher,
        )  # fmt: skip

    def run(self, held_out: Groups, for_choice: Sequence[Batch], resume: bool) -> Conversion:
        """Run all stages that are left."""
        try:
            if resume and self.path is not None:
                self._resume(self.path)
            prepared = {name: self._prepared(batches) for name, batches in held_out.items()}
            prepared_for_choice = self._prepared(for_choice)
            if "original" not in self.result.figures:
                self._poll()
                self._figures("original", self.original, prepared)
            self._find_exact_up_to()
            if self.progress.stage == "transfer" and not self.progress.step:
                first = self._to_device(self.batches(0))
                transfer.calibrate(self.model, self.original, self.result.converted, first)
            self._measure("swapped", prepared)
            self._train_stage("transfer")
            self._measure("transferred", prepared)
            self._choose(prepared_for_choice)
            self._train_stage("fine-tune")
            self._measure("tuned", prepared)
            self._save()
            self._finish(prepared)
            self.result.status = "complete"
        except _Stopped:
            self.result.status = "interrupted"
        except BaseException:
            self.adapter.restore(self.model, self.original)
            raise
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.grad = None
                parameter.requires_grad_(self.requires_grad.get(name, True))
        return self.result

    def _resume(self, path: Path) -> None:
        if not path.exists():
            return
        self.progress, tensors, self.optimiser = checkpoint.load(path, self.identity)
        self.result = Conversion(**{**self.progress.result, "status": "running"})
        if self.result.chosen:
            names = [*self.result.converted, *self.result.chosen]
            self.adapter.keep(self.model, self.original, self.mechanism, names, [*self.result.chosen])
        self.best = {name.removeprefix(BEST): x for name, x in tensors.items() if name.startswith(BEST)}
        self.model.load_state_dict({name: x for name, x in tensors.items() if not name.startswith(BEST)})
        self.watch({"message": f"resumes from {path}: {self.progress.stage}, step {self.progress.step:,}"})

    def _save(self, optimiser: torch.optim.Optimizer | None = None) -> None:
        if self.path is not None:
            self.progress.result = asdict(self.result)
            state = None if optimiser is None else optimiser.state_dict()
            best = {BEST + name: x for name, x in self.best.items()}
            checkpoint.save(self.path, self.identity, self.progress, self.model.state_dict() | best, state)

    def _poll(self) -> None:
        if self.signals.caught:
            raise _Stopped

    def _prepared(self, batches: Sequence[Batch]) -> list[HeldOutBatch]:
        return self.goal.prepare(self.original, [self._to_device(batch) for batch in batches])

    def _figures(self, when: str, model: Any, prepared: Held) -> None:
        self.watch({"measuring": when})
        figures, groups = self.goal.measure_groups(model, prepared)
        self.watch({"measured": when, **figures})
        self.result.figures[when] = figures
        if [*groups] != [""]:
            self.result.by_group[when] = groups

    def _measure(self, when: str, prepared: Held) -> None:
        """Measure a stage, unless a checkpoint brought that: figures, errors of the layers; keep the best."""
        if when in self.result.figures:
            return
        self._poll()
        result, batches = self.result, [held.batch for held in chain(*prepared.values())]
        if self.teacher == "original":
            result.errors[when] = transfer.errors(self.model, self.original, result.converted, batches)
        undo = self._limit()
        self._figures(when, self.model, prepared)
        undo()
        if result.chosen or not result.best or result.judged(when) < result.judged(result.best):
            result.best = when
            self.best = {name: x.clone() for name, x in self.model.state_dict().items()}

    def _find_exact_up_to(self) -> None:
        """Measure up to which length exact attention is faster, if that was asked for."""
        if self.exact_up_to == "auto" and self.result.exact_up_to is None:
            layers = self.adapter.layers(self.original), self.result.converted
            self.result.exact_up_to = adapters.crossover_of(self.adapter, self.model, *layers, self.teacher, self.watch)

    def _limit(self) -> Callable[[], None]:
        """Let exact attention serve the queries that see few tokens, if that was asked for; what undoes that."""
        if self.result.exact_up_to is None:
            return lambda: None
        return self.adapter.exact_below(self.model, self.original, self.result.converted, self.result.exact_up_to)

    def _finish(self, prepared: Held) -> None:
        """Give the model the weights of the best stage; measure what its mechanism's parts are worth."""
        result = self.result
        self._poll()
        if result.best != "tuned":
            self.model.load_state_dict(self.best)
        result.ablations = ablation.measure(
            self.model, result.converted, self._limit, lambda: self.goal.measure_groups(self.model, prepared)
        )
        self._poll()
        self._limit()
        if result.exact_up_to is not None:
            result.mechanism = repr(crossover.exact_below(self.mechanism, result.exact_up_to))

    def _train_stage(self, stage: Stage) -> None:
        """Run the steps of a stage that are left: none if it is finished or has nothing to train."""
        if STAGES.index(self.progress.stage) > STAGES.index(stage):
            return
        settings, progress = self.settings, self.progress
        groups = trained.groups(stage, self.model, self.result.converted, settings, self.teacher)
        share = settings.share * (self.teacher == "original")
        fraction = share if stage == "transfer" else 1 - share
        self.model.requires_grad_(False)
        for parameter in (p for group in groups for p in group["params"]):
            parameter.requires_grad_(True)
        optimiser = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True) if groups else None
        if optimiser is not None and self.optimiser is not None:
            optimiser.load_state_dict(self.optimiser)
        start, saved_at, self.optimiser = time.monotonic() - progress.seconds, progress.seconds, None
        try:
            while optimiser is not None and settings.done(fraction, progress.step, progress.seconds) < 1.0:
                self._poll()
                self._step(stage, optimiser, settings.pace(fraction, progress.step, progress.seconds))
                progress.seconds = time.monotonic() - start
                self._report(stage, settings.done(fraction, progress.step, progress.seconds))
                if progress.seconds - saved_at >= settings.save_seconds:
                    saved_at = progress.seconds
                    self._save(optimiser)
        except _Stopped:
            self._save(optimiser)
            raise
        self._enter_next(stage)

    def _report(self, stage: Stage, done: float) -> None:
        """Send a line to the watcher, and at fixed fractions of the stage add a point to the curve."""
        at, curve = self.progress, self.result.curves.setdefault(stage, [])
        line = {"stage": stage, "step": at.step, "seconds": at.seconds, "loss": at.loss}
        if done * POINTS >= len(curve) + 1:
            curve.append([line[name] for name in ("step", "seconds", "loss")])
        self.watch({**line, "done": min(done, 1.0)})

    def _enter_next(self, stage: Stage) -> None:
        self.progress = Progress(STAGES[STAGES.index(stage) + 1], batches=self.progress.batches)
        self._save()

    def _to_device(self, batch: Batch) -> Batch:
        return self.adapter.to_device(batch, self.device)

    def _step(self, stage: Stage, optimiser: torch.optim.Optimizer, pace: float) -> None:
        batch = self._to_device(self.batches(self.progress.batches))
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bfloat16")
        if stage == "transfer":
            with autocast:
                loss = transfer.train(self.model, self.original, self.result.converted, batch)
        else:
            with autocast:
                loss_tensor = self.goal.loss(self.model, self.original, batch)
            if loss_tensor.requires_grad:  # a window over everything leaves nothing to train
                loss_tensor.backward()
            loss = float(loss_tensor.detach())
            parameters = [p for group in optimiser.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.settings.clip or math.inf)
        if not math.isfinite(loss):
            raise Diverged(f"in the {stage}, at step {self.progress.step}, the loss is {loss}: try lower rates")
        for group in optimiser.param_groups:
            group["lr"] = group["top"] * pace
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self.progress.loss = loss if self.progress.loss is None else DECAY * self.progress.loss + (1 - DECAY) * loss
        self.progress.step += 1
        self.result.steps += 1
        self.progress.batches += 1

    def _choose(self, prepared: Sequence[HeldOutBatch]) -> None:
        """Measure the loss with each layer put back, and choose those that stay exact for the budget."""
        if STAGES.index(self.progress.stage) > STAGES.index("choice"):
            return
        names, losses = self.result.converted, {}

        def loss_with(kept: Sequence[str]) -> float:
            if (key := frozenset(kept)) not in losses:
                self._poll()
                self.watch({"measuring": f"with {', '.join(kept) or 'no layer'} exact"})
                with choosing.put_back(self.model, self.original, kept):
                    losses[key] = self.goal.measure(self.model, prepared)["loss"]
            return losses[key]

        self.result.whole = loss_with([])
        self.result.put_back = {name: loss_with([name]) for name in names}
        if self.budget is not None:
            self.result.limit = self.budget * self.goal.measure(self.original, prepared)["loss"]
            choice = choosing.within(loss_with, names, self.result.limit, f"{self.budget:g}", self.mechanism)
            if choice.kept:
                self.adapter.keep(self.model, self.original, self.mechanism, names, choice.kept)
                self.result.chosen = dict(zip(choice.kept, choice.losses, strict=True))
                self.result.kept |= dict.fromkeys(choice.kept, "for the budget")
        self._enter_next("choice")
