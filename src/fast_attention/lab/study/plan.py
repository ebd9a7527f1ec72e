"""Plans a study: the same task, steps, order of the data and number of parameters for every mechanism."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from fast_attention.lab import inputs
from fast_attention.lab.inputs import InputError
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.tasks.task import Task
from fast_attention.training.settings import TrainingSettings
from fast_attention.training.steps import config_for, loss_of

BESIDE = " + "  # separates the mechanisms of layers that alternate
EXACT, ALONE = "Softmax()", "Local(window=0)"
LONGEST = 120  # characters of a name in that of a folder
EQUAL = ("steps", "minutes")  # what every run may have as much of
CONTROLS = {EXACT: "exact attention", ALONE: "no mixing: every token attends to itself only"}


@dataclass(frozen=True)
class Plan:
    """A study. ``model`` holds the settings of ``ModelConfig`` that all its models share."""

    task: Task
    mechanisms: tuple[str, ...]
    seeds: int
    settings: TrainingSettings
    model: dict[str, Any]

    @classmethod
    def of(
        cls, task: Task, mechanisms: list[str], seeds: int, settings: TrainingSettings, model: dict[str, Any]
    ) -> Plan:
        """The mechanisms with the controls before them, each once; ``"A() + B()"`` gives the layers A and B in turn.

        Raises:
            InputError: A mechanism cannot do the task.
        """
        names = tuple(dict.fromkeys([*CONTROLS, *mechanisms]))
        for name in names:
            with inputs.refusing(NotImplementedError, where=f"{name}: "):
                _try(task, matched(task, name, model), settings)
        if model.get("positions", "auto") == "auto":  # the same for all
            every = tuple(part for name in names for part in name.split(BESIDE))
            shared = config_for(task, mechanism=every, **{**model, "layers": len(every)})
            model = {**model, "positions": shared.positions}
        return cls(task, names, seeds, settings, model)

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Mechanism and seed; all mechanisms with one seed before the next, so that a stopped study has equal seeds."""
        return [(name, seed) for seed in range(self.seeds) for name in self.mechanisms]

    def settings_for(self, seed: int) -> TrainingSettings:
        """The settings of one seed: other weights, dropout and order of the data, the same for all mechanisms."""
        return replace(self.settings, seed=self.settings.seed + seed, order=self.settings.order + seed)


def budget(asked: str | None, settings: TrainingSettings) -> str:
    """What every run has as much of: steps, minutes, or "steps or minutes", whichever end first.

    Raises:
        InputError: The settings bound the runs by something else than what is asked for.
    """
    given = [name for name in EQUAL if getattr(settings, name)]
    if asked not in (None, *EQUAL):
        raise InputError(f"--equal {asked}: choose one of {', '.join(EQUAL)}")
    if asked is not None and given != [asked]:
        (other,) = set(EQUAL) - {asked}
        raise InputError(f"--equal {asked}: give --{asked} and no --{other}, here or in --config")
    return " or ".join(given)


def folder(name: str, seed: int) -> str:
    """The folder of a cell; with a digest where a minus would be lost, or the name is longer than file systems take."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
    if len(plain) > LONGEST or "-" in name:
        plain = f"{plain[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return f"{plain}-seed{seed}"


def matched(task: Task, mechanism: str, model: dict[str, Any]) -> ModelConfig:
    """A model with as many parameters as that with exact attention, by the width of its feed-forward layers.

    A mechanism whose own weights alone outweigh that gets feed-forward layers of one unit and stays larger.
    """
    base = config_for(task, mechanism=EXACT, **model)
    target = parameters(replace(base, hidden=base.hidden or 4 * base.width))
    config = config_for(task, mechanism=tuple(mechanism.split(BESIDE)), **model)
    least, unit = parameters(replace(config, hidden=1)), config.layers * (2 * config.width + 1)
    return replace(config, hidden=1 + max(0, round((target - least) / unit)))


@torch.no_grad()
def _try(task: Task, config: ModelConfig, settings: TrainingSettings) -> None:
    """Run a model on one sequence, so that what a mechanism denies, padding say, shows before any is trained."""
    with torch.random.fork_rng(devices=[]):
        loss_of(Model(config), task.batch("train", 0, 1), settings)


def parameters(config: ModelConfig) -> int:
    """The number of a model's trainable parameters."""
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in Model(config).parameters() if p.requires_grad)


def label(name: str) -> str:
    """The name of a mechanism in pictures."""
    return {EXACT: "exact attention", ALONE: "no mixing"}.get(name, name)


def named(text: str) -> list[str]:
    """The mechanisms that an option names: several with commas between, those of different layers with a plus.

    Raises:
        InputError: No such mechanism or setting.
    """
    parts = [[repr(each) for each in inputs.mechanisms([part])] for part in text.split(BESIDE.strip())]
    if len(parts) > 1 and any(len(part) > 1 for part in parts):
        raise InputError(f"{text}: give mixtures of layers one by one, without commas")
    return parts[0] if len(parts) == 1 else [BESIDE.join(part[0] for part in parts)]
