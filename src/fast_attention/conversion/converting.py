"""The stages of a conversion, one after the other, each of which can be stopped and gone on with."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fast_attention import catalogue
from fast_attention.conversion import choosing, kinds, place, transfer
from fast_attention.conversion.goals import Held
from fast_attention.conversion.kinds import Batch
from fast_attention.conversion.outcome import Conversion, Figures
from fast_attention.conversion.place import STAGES, Place, Stage
from fast_attention.conversion.settings import ConversionSettings
from fast_attention.mechanism import Unsupported
from fast_attention.training.loop import Diverged
from fast_attention.training.signals import Signals

POINTS = 100  # of a stage's curve of losses
FADING = 0.95  # of the running mean of losses, a step
BETAS = (0.9, 0.98)  # AdamW's
FASTER = 10.0  # the mechanisms' own weights in the fine-tune, against all others


class _Stopped(Exception):
    """A signal asked for the end."""


def run(
    model: Any, mechanism: Any, batches: Callable[[int], Batch], held_out: Sequence[Batch], *,
    settings: ConversionSettings, keep: Sequence[int], budget: float | None, choosing: Sequence[Batch],
    checkpoint: str | os.PathLike[str] | None, resume: bool, watch: Callable[[dict[str, Any]], None],
) -> Conversion:  # fmt: skip
    """See ``fast_attention.convert``."""
    _check(held_out, budget)
    path = None if checkpoint is None else Path(checkpoint)
    under_way = _Run(model, catalogue.parse(mechanism), batches, settings, keep, budget, path, watch)
    with Signals() as signals:
        under_way.signals = signals
        return under_way.go(held_out, choosing or held_out, resume)


def _check(held_out: Sequence[Batch], budget: float | None) -> None:
    if not held_out:
        raise ValueError("held_out is empty: give at least one batch that the training does not see")
    if budget is not None and not budget >= 1.0:
        raise ValueError(f"budget={budget!r} is a multiple of the original's loss, at least 1, such as 1.02")


class _Run:
    signals: Signals

    def __init__(
        self, model: Any, mechanism: Any, batches: Callable[[int], Batch], settings: ConversionSettings,
        keep: Sequence[int], budget: float | None, path: Path | None, watch: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self.model, self.mechanism, self.batches = model, mechanism, batches
        self.settings, self.budget, self.path, self.watch = settings, budget, path, watch
        self.kind = kinds.of(model)
        self.original = self.kind.original(model)
        self.wished = {name: p.requires_grad for name, p in model.named_parameters()}
        runs = {name: repr(bound.mechanism) for name, bound in self.kind.layers(self.original).items()}
        layers = [*runs]
        for number in keep:
            if not 0 <= number < len(layers):
                raise ValueError(f"keep names layer {number}; the model's layers go from 0 to {len(layers) - 1}")
        asked = {name: "asked for" for i, name in enumerate(layers) if i in keep}
        torch.manual_seed(settings.seed)
        kept = asked | self.kind.put(model, mechanism, [name for name in layers if name not in asked])
        model.eval()
        self.goal = self.kind.goal(model, settings.distil)
        self.told = Conversion(self.goal.name, repr(mechanism), layers, kept, runs)
        self.device = next(model.parameters()).device
        self.at, self.optimiser = Place(), None
        self.of = {
            "model": f"{type(model).__name__} of {sum(p.numel() for p in self.original.parameters()):,} parameters",
            "mechanism": repr(mechanism), "keep": repr(sorted(keep)), "budget": repr(budget),
            "settings": repr(settings),
        }  # fmt: skip

    def go(self, held_out: Sequence[Batch], apart: Sequence[Batch], resume: bool) -> Conversion:
        """All stages that are left."""
        if resume and self.path is not None and self.path.exists():
            self._resume(self.path)
        held, aside = (
            self.goal.hold(self.original, [self._placed(batch) for batch in given]) for given in (held_out, apart)
        )
        try:
            if "original" not in self.told.figures:
                self.told.figures["original"] = self._figures("original", self.original, held)
            self._measure("swapped", held)
            if self.at.stage == "transfer" and not self.at.step:
                first = self._placed(self.batches(0))
                transfer.calibrate(self.model, self.original, self.told.converted, first)
            self._stage("transfer", self._transfer_groups())
            self._measure("transferred", held)
            self._choose(aside)
            self._stage("fine-tune", self._tuned_groups())
            self._measure("tuned", held)
            self._save()
            self.told.status = "complete"
        except _Stopped:
            self.told.status = "interrupted"
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.grad = None
                parameter.requires_grad_(self.wished.get(name, True))
        return self.told

    def _resume(self, path: Path) -> None:
        self.at, tensors, self.optimiser = place.load(path, self.of)
        self.told = Conversion(**{**self.at.told, "status": "running"})
        if self.told.chosen:
            names = [*self.told.converted, *self.told.chosen]
            self.kind.keep(self.model, self.original, self.mechanism, names, [*self.told.chosen])
        self.model.load_state_dict(tensors)
        self.watch({"message": f"goes on from {path}: {self.at.stage}, step {self.at.step:,}"})

    def _save(self, optimiser: torch.optim.Optimizer | None = None) -> None:
        if self.path is not None:
            self.at.told = asdict(self.told)
            state = None if optimiser is None else optimiser.state_dict()
            place.save(self.path, self.of, self.at, self.model.state_dict(), state)

    def _poll(self) -> None:
        if self.signals.caught:
            raise _Stopped

    def _figures(self, when: str, model: Any, held: Sequence[Held]) -> Figures:
        self._poll()
        self.watch({"measuring": when})
        found = self.goal.measure(model, held)
        self.watch({"measured": when, **found})
        return found

    def _measure(self, when: str, held: Sequence[Held]) -> None:
        """The figures and every layer's error as they are now, unless they are known."""
        if when not in self.told.figures:
            found = self._figures(when, self.model, held)
            batches = [each.batch for each in held]
            self.told.errors[when] = transfer.errors(self.model, self.original, self.told.converted, batches)
            self.told.figures[when] = found

    def _transfer_groups(self) -> list[dict[str, Any]]:
        maps, projections = transfer.weights(self.model, self.told.converted)
        rates = ((maps, self.settings.lr_maps), (projections, self.settings.lr_projections))
        return [{"params": each, "top": rate, "weight_decay": 0.0} for each, rate in rates if each and rate]

    def _tuned_groups(self) -> list[dict[str, Any]]:
        fixed = {id(p) for p in self.kind.embeddings(self.model)}
        maps = transfer.weights(self.model, self.told.converted)[0]
        fixed |= {id(p) for p in maps}
        free = [p for p in self.model.parameters() if id(p) not in fixed]
        matrices, rest = [p for p in free if p.ndim == 2], [p for p in free if p.ndim != 2]
        decay, top = self.settings.weight_decay, self.settings.lr
        groups = [
            {"params": maps, "top": FASTER * top, "weight_decay": 0.0},
            {"params": matrices, "top": top, "weight_decay": decay},
            {"params": rest, "top": top, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def _stage(self, stage: Stage, groups: list[dict[str, Any]]) -> None:
        """The steps of a stage that are left; nothing where it lies behind or has nothing to train."""
        if STAGES.index(self.at.stage) > STAGES.index(stage):
            return
        settings, at = self.settings, self.at
        share = settings.share if stage == "transfer" else 1 - settings.share
        self.model.requires_grad_(False)
        for parameter in (p for group in groups for p in group["params"]):
            parameter.requires_grad_(True)
        optimiser = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True) if groups else None
        if optimiser is not None and self.optimiser is not None:
            optimiser.load_state_dict(self.optimiser)
        start, saved, self.optimiser = time.monotonic() - at.seconds, at.seconds, None
        try:
            while optimiser is not None and settings.done(share, at.step, at.seconds) < 1.0:
                self._poll()
                self._step(stage, optimiser, settings.pace(share, at.step, at.seconds))
                at.seconds = time.monotonic() - start
                self._tell(stage, settings.done(share, at.step, at.seconds))
                if at.seconds - saved >= settings.save_seconds:
                    saved = at.seconds
                    self._save(optimiser)
        except _Stopped:
            self._save(optimiser)
            raise
        self._next(stage)

    def _tell(self, stage: Stage, done: float) -> None:
        """A line for the watcher, and now and then a point of the curve."""
        curve = self.told.curves.setdefault(stage, [])
        line = {"stage": stage, "step": self.at.step, "seconds": self.at.seconds, "loss": self.at.loss}
        if done * POINTS >= len(curve) + 1:
            curve.append([line[name] for name in ("step", "seconds", "loss")])
        self.watch({**line, "done": min(done, 1.0)})

    def _next(self, stage: Stage) -> None:
        self.at = Place(STAGES[STAGES.index(stage) + 1], batches=self.at.batches)
        self._save()

    def _placed(self, batch: Batch) -> Batch:
        return self.kind.placed(batch, self.device)

    def _step(self, stage: Stage, optimiser: torch.optim.Optimizer, pace: float) -> None:
        batch = self._placed(self.batches(self.at.batches))
        half = torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bfloat16")
        if stage == "transfer":
            with half:
                loss = transfer.train(self.model, self.original, self.told.converted, batch)
        else:
            with half:
                found = self.goal.loss(self.model, self.original, batch)
            found.backward()
            loss = float(found.detach())
            trained = [p for group in optimiser.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(trained, self.settings.clip or math.inf)
        if not math.isfinite(loss):
            raise Diverged(f"in the {stage}, at step {self.at.step}, the loss is {loss}: try lower rates")
        for group in optimiser.param_groups:
            group["lr"] = group["top"] * pace
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self.at.loss = loss if self.at.loss is None else FADING * self.at.loss + (1 - FADING) * loss
        self.at.step += 1
        self.at.batches += 1

    def _choose(self, apart: Sequence[Held]) -> None:
        """What each layer is worth if it is put back, and which stay exact for the budget."""
        if STAGES.index(self.at.stage) > STAGES.index("choice"):
            return
        names, known = self.told.converted, {}

        def loss_with(kept: Sequence[str]) -> float:
            if (key := frozenset(kept)) not in known:
                self._poll()
                self.watch({"measuring": f"with {', '.join(kept) or 'no layer'} exact"})
                with choosing.put_back(self.model, self.original, kept):
                    known[key] = self.goal.measure(self.model, apart)["loss"]
            return known[key]

        self.told.whole = loss_with([])
        self.told.put_back = {name: loss_with([name]) for name in names}
        if self.budget is not None:
            self.told.limit = self.budget * self.goal.measure(self.original, apart)["loss"]
            found = choosing.choose(loss_with, names, self.told.limit)
            if len(found.kept) == len(names):
                least = [self.told.whole, *found.losses][-2]
                raise Unsupported(
                    f"within {self.budget:g} times the original's loss no layer can run {self.mechanism!r}: with one "
                    f"layer of {len(names)} left to it the loss is {least:.4f}, and {self.told.limit:.4f} is allowed. "
                    "What would work: a larger budget, more minutes"
                )
            if found.kept:
                self.kind.keep(self.model, self.original, self.mechanism, names, found.kept)
                self.told.chosen = dict(zip(found.kept, found.losses, strict=True))
                self.told.kept |= dict.fromkeys(found.kept, "for the budget")
        self._next("choice")
