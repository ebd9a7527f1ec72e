"""Trains several mechanisms on one task: what each learns in the same time or steps, and what a step costs.

python -m experiments.study mqar --mechanisms LinearAttention "Local(window=16)" --minutes 2 --out out/study

Every model has as many parameters as that with exact attention, the same data in the same order, and the same number
of steps or minutes. A study that was stopped goes on with the same command and --resume.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments import tasks
from experiments.arguments import Arguments
from experiments.models import Model, ModelConfig
from experiments.tasks import Task
from experiments.train import (
    CHECKPOINTS,
    SHAPE,
    Diverged,
    Outcome,
    TrainingSettings,
    add_options,
    config_for,
    given,
    loss_of,
    read_log,
    settings_from,
    train,
)  # fmt: skip
from fast_attention import catalogue, counting, files
from fast_attention.lab import tables
from fast_attention.lab.environment import begun
from fast_attention.lab.pictures import COLOURS, INK, PALE, STYLE
from fast_attention.lab.records import Record
from fast_attention.lab.tables import Table

BESIDE = " + "  # separates the mechanisms of layers that alternate: "Local() + LinearAttention()"
EXACT, ALONE = "Softmax()", "Local(window=0)"
CONTROLS = {EXACT: "exact attention", ALONE: "no mixing: every token attends to itself only"}
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # t for 95 % of two sides, by degrees of freedom


# The record


@dataclass
class Result:
    """One training run. ``value`` and the curve are in the task's metric, on the fixed validation set."""

    mechanism: str
    seed: int
    status: str
    value: float | None  # at the end
    best: float | None
    steps: int
    step_seconds: float  # the median over the log
    peak_bytes: int  # of one step, counted
    parameters: int
    hidden: int  # width of the feed-forward layers that makes the parameters equal
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # step, seconds, value
    # First and last position, loss there; of the model with the best value, for causal language modelling.
    by_position: list[tuple[int, int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """A mechanism over its seeds: mean of the final values, half the width of its 95 % interval, cost of a step."""

    mean: float
    spread: float | None
    seeds: int
    steps: int  # of a run, the mean
    step_seconds: float
    peak_bytes: int
    parameters: int


@dataclass
class Study(Record):
    """All of one study: ``study.json``."""

    kind, noun = "study", "study"
    same = ("task", "data", "training", "model", "fast_attention")
    data, page = "study.json", "study.svg"

    results: list[Result] = field(default_factory=list)

    @classmethod
    def resume(cls, path: Path, meta: dict[str, Any]) -> Self:
        """The record of a study that goes on, perhaps with more mechanisms and seeds than before."""
        record = super().resume(path, meta)
        names, seeds = [r.mechanism for r in record.results], 1 + max((r.seed for r in record.results), default=-1)
        if others := [name for name in dict.fromkeys(names) if name not in meta["mechanisms"]]:
            raise ValueError(f"--resume: {path} holds runs of {', '.join(others)}: give these --mechanisms too")
        if seeds > meta["seeds"]:
            raise ValueError(f"--resume: {path} holds {seeds} seeds: give --seeds {seeds} or more, not {meta['seeds']}")
        return record

    @property
    def equal(self) -> str:
        """What every run had as much of; records of before this was kept had equal steps."""
        return str(self.meta.get("equal", "steps"))

    def of(self, mechanism: str) -> list[Result]:
        """The complete runs of a mechanism."""
        return [r for r in self.results if r.mechanism == mechanism and r.value is not None and r.status != "failed"]

    def summary(self, mechanism: str) -> Summary | None:
        """Means over the seeds, or None before the first is done."""
        results = self.of(mechanism)
        values = [r.value for r in results if r.value is not None]
        if not results:
            return None
        spread = None
        if len(values) > 1:
            student = STUDENT[min(len(values) - 2, len(STUDENT) - 1)]
            spread = student * statistics.stdev(values) / math.sqrt(len(values))
        seconds, peak = statistics.median(r.step_seconds for r in results), max(r.peak_bytes for r in results)
        steps = round(statistics.fmean(r.steps for r in results))
        return Summary(statistics.fmean(values), spread, len(values), steps, seconds, peak, results[0].parameters)

    def curve(self, mechanism: str) -> dict[float, float]:
        """The metric by steps, or by minutes where these were equal: means over the runs, at steps that all have."""
        runs = [{step: (seconds / 60, value) for step, seconds, value in r.curve} for r in self.of(mechanism)]
        shared = sorted(set.intersection(*({*run} for run in runs))) if runs else []
        points = [
            [(run[step][0] if self.equal == "minutes" else step, run[step][1]) for run in runs] for step in shared
        ]
        return {statistics.fmean(x for x, _ in each): statistics.fmean(y for _, y in each) for each in points}

    def by_position(self, mechanism: str) -> dict[tuple[int, int], float]:
        """The loss by first and last position of each bucket, the mean over the seeds; empty where none was kept."""
        losses: dict[tuple[int, int], list[float]] = {}
        for first, last, loss in (row for result in self.of(mechanism) for row in result.by_position):
            losses.setdefault((first, last), []).append(loss)
        return {bucket: statistics.fmean(values) for bucket, values in losses.items()}


# The plan


def label(name: str) -> str:
    """The name of a mechanism in pictures."""
    return {EXACT: "exact attention", ALONE: "no mixing"}.get(name, name)


def parameters(config: ModelConfig) -> int:
    """The number of a model's trainable parameters."""
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in Model(config).parameters() if p.requires_grad)


def matched(task: Task, mechanism: str, model: dict[str, Any]) -> ModelConfig:
    """A model with as many parameters as that with exact attention, by the width of its feed-forward layers.

    A mechanism whose own weights alone outweigh that gets feed-forward layers of one unit and stays larger.
    """
    base = config_for(task, mechanism=EXACT, **model)
    target = parameters(replace(base, hidden=base.hidden or 4 * base.width))
    config = config_for(task, mechanism=tuple(mechanism.split(BESIDE)), **model)
    least, unit = parameters(replace(config, hidden=1)), config.layers * (2 * config.width + 1)
    return replace(config, hidden=1 + max(0, round((target - least) / unit)))


def planned(task: Task, mechanisms: list[str], model: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The mechanisms with the controls before them, each once, and the model's settings with positions for all.

    Raises:
        ValueError: A mechanism cannot do the task.
    """
    spelt = [BESIDE.join(repr(catalogue.parse(part)) for part in name.split(BESIDE.strip())) for name in mechanisms]
    names = list(dict.fromkeys([*CONTROLS, *spelt]))
    for name in names:  # on one sequence, so that what a mechanism denies shows before any is trained
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                loss_of(Model(matched(task, name, model)), task.batch("train", 0, 1))
        except NotImplementedError as error:
            raise ValueError(f"{name}: {error}") from error
    if model.get("positions", "auto") == "auto":
        every = tuple(part for name in names for part in name.split(BESIDE))
        model = {**model, "positions": config_for(task, mechanism=every, **{**model, "layers": len(every)}).positions}
    return names, model


# The runs


def cell(
    task: Task, mechanism: str, seed: int, settings: TrainingSettings, model: dict[str, Any], out: Path | None = None,
    watch: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Result | None:  # fmt: skip
    """One run of a study, resumed where there is a checkpoint in ``out``; None if it was stopped.

    A seed is one of the weights, of dropout and of the data's order, the same for all mechanisms.
    """
    config = matched(task, mechanism, model)
    settings = replace(settings, seed=settings.seed + seed, order=settings.order + seed)
    lines: list[dict[str, Any]] = []

    def keep(line: dict[str, Any]) -> None:
        lines.append(line)
        watch(line)

    try:
        outcome: Outcome = train(task, config, settings, out, resume=True, restart=True, watch=keep)
    except Diverged:
        return Result(mechanism, seed, "failed", None, None, 0, 0.0, 0, 0, config.hidden)
    if outcome.status == "interrupted":
        return None
    lines = lines if out is None else read_log(out)
    times = [line["step_seconds"] for line in lines if "step_seconds" in line]
    return Result(
        mechanism, seed, outcome.status, outcome.valid, outcome.best, outcome.step,
        statistics.median(times) if times else outcome.seconds / max(outcome.step, 1),
        peak(task, config, settings), outcome.parameters, config.hidden,
        [(line["step"], line["seconds"], line["valid"]) for line in lines if "valid" in line], outcome.by_position,
    )  # fmt: skip


def peak(task: Task, config: ModelConfig, settings: TrainingSettings) -> int:
    """The most bytes that the tensors of one forward and backward pass hold at once, gradients included."""
    with torch.random.fork_rng(devices=[]):
        model = Model(config).to(settings.device).train()
        batch = task.batch("train", 0, settings.batch_size).to(settings.device)
        return counting.peak_bytes(lambda: loss_of(model, batch).backward(), settings.device)


def run(
    study: Study, task: Task, settings: TrainingSettings, out: Path, watch: Callable[[str, dict[str, Any]], None]
) -> bool:
    """Train what the record lacks, all mechanisms with one seed before the next; False if it was stopped."""
    done = {(result.mechanism, result.seed) for result in study.results}
    for seed in range(study.meta["seeds"]):
        for name in study.meta["mechanisms"]:
            plain = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")[:80]
            folder = out / "cells" / f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-seed{seed}"
            if (name, seed) not in done:
                says = f"{name} seed {seed}"
                result = cell(task, name, seed, settings, study.meta["model"], folder, lambda x: watch(says, x))
                if result is None:
                    return False
                study.results.append(result)
                study.save(out / Study.data)
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # the record has it now, the folder its model
    return True


# What it shows


def table(study: Study) -> Table:
    """The mechanisms and the baselines, the best mean first."""
    rising, exact = study.meta["metric"] == "accuracy", study.summary(EXACT)
    ranked: list[tuple[float, list[str]]] = []
    for name in study.meta["mechanisms"]:
        summary, title = study.summary(name), f"{name}  ({CONTROLS[name]})" if name in CONTROLS else name
        if summary is None:
            words = "diverged" if any(r.mechanism == name for r in study.results) else "not reached"
            ranked.append((-math.inf if rising else math.inf, [title, words, "", "0", "", "", "", ""]))
            continue
        spread = "" if summary.spread is None else f" ± {summary.spread:.4f}"
        gap = "" if exact is None or name == EXACT else f"{summary.mean - exact.mean:+.4f}"
        counts = [str(summary.seeds), f"{summary.steps:,}", f"{1000 * summary.step_seconds:.1f} ms"]
        sizes = [f"{summary.peak_bytes / 2**20:.1f} MiB", f"{summary.parameters:,}"]
        ranked.append((summary.mean, [title, f"{summary.mean:.4f}{spread}", gap, *counts, *sizes]))
    for name, value in study.meta["baselines"].items():
        gap = "" if exact is None else f"{value - exact.mean:+.4f}"
        ranked.append((value, [f"baseline: {name}", f"{value:.4f}", gap, "", "", "", "", ""]))
    heads = ["mechanism", study.meta["metric"], "against exact", "seeds", "steps", "a step", "peak", "parameters"]
    rows = [row for _, row in sorted(ranked, key=lambda pair: pair[0], reverse=rising)]
    return Table(heads, rows, title=f"{study.meta['task']}: every run had the same number of {study.equal}")


def figure(study: Study) -> tuple[Figure, str]:
    """Curves, quality against the time of a step and, of language models, the loss by position; and a sentence."""
    means = {name: summary for name in study.meta["mechanisms"] if (summary := study.summary(name))}
    positions, metric = [name for name in means if study.by_position(name)], study.meta["metric"]
    width, longest = 13 if positions else 9.5, max((len(label(name)) for name in means), default=0)
    columns = max(1, min(4, int(13 * width / (longest + 8))))  # of the legend
    picture = Figure(figsize=(width, 4.2 + 0.2 * math.ceil((len(means) + 1) / columns)), layout="constrained")
    panels: list[Axes] = list(picture.subplots(1, 3 if positions else 2, squeeze=False).flat)
    for at, (name, summary) in enumerate(means.items()):
        style: dict[str, Any] = {"linewidth": 1.4, "linestyle": "--" if at >= len(COLOURS) else "-"}
        style["color"] = {EXACT: INK, ALONE: PALE}.get(name, COLOURS[at % len(COLOURS)])
        marker, points = "osD^vP*X"[at % 8], study.curve(name)
        panels[0].plot(list(points), list(points.values()), marker=marker, markersize=4, markevery=0.2, **style)
        spread, ends = summary.spread or 0.0, (summary.mean, 1 - summary.mean)  # of an accuracy, at 0 and at 1
        bars = [[min(spread, end)] for end in ends] if metric == "accuracy" else spread
        cost = 1000 * summary.step_seconds
        panels[1].errorbar(cost, summary.mean, bars, marker=marker, markersize=7, capsize=3, label=label(name), **style)
        if found := study.by_position(name):
            middles = [math.sqrt((first + 1) * (last + 1)) for first, last in found]
            panels[2].plot(middles, list(found.values()), marker=marker, markersize=4, **style)
    for axes in panels[:2]:
        for number, value in enumerate(study.meta["baselines"].values()):
            word: dict[str, Any] = {"label": "baselines"} if axes is panels[1] and not number else {}
            axes.axhline(value, color=PALE, linestyle=":", linewidth=1, zorder=0, **word)
        axes.set_ylabel(f"{metric} on the validation set ({'higher' if metric == 'accuracy' else 'lower'} is better)")
        axes.margins(y=0.08)
    panels[0].set_xlabel("minutes" if study.equal == "minutes" else "steps")
    panels[1].set_xlabel("milliseconds for a training step")
    costs = [1000 * summary.step_seconds for summary in means.values()]
    if costs and max(costs) > 4 * min(costs):
        panels[1].set_xscale("log")
        panels[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels[1].xaxis.set_minor_formatter(NullFormatter())
    panels[1].xaxis.set_major_formatter("{x:,g}")
    panels[1].margins(x=0.15)
    if positions:
        panels[2].set_xscale("log", base=2)
        panels[2].xaxis.set_major_formatter("{x:,g}")
        panels[2].set_xlabel("position in the context")
        panels[2].set_ylabel(metric)
    picture.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=columns, fontsize=8)
    pick = max if metric == "accuracy" else min
    best = f"; the best mean is {label(pick(means, key=lambda name: means[name].mean))}'s" if means else ""
    return picture, f"{metric} of {len(means)} mechanisms on {study.meta['task']}{best}"


def main(arguments: list[str] | None = None) -> int:
    """Carry out a study, show its table and write its picture; 130 where a signal ended it."""
    about = argparse.RawDescriptionHelpFormatter
    parser = Arguments("experiments.study", description=__doc__, formatter_class=about)
    parser.add_argument("task", help="a task's name or expression, or a name and a file: 'classify FILE'")
    parser.add_argument("--mechanisms", nargs="+", default=[], help="A + B for layers that alternate; two controls")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mechanism (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("out/study"), help="folder of record, picture and runs")
    parser.add_argument("--resume", action="store_true", help="continue the study in the folder")
    parser.add_argument("--restart", action="store_true", help="begin anew over the study in the folder")
    add_options(parser, TrainingSettings)
    add_options(parser, ModelConfig, *(name for name in SHAPE if name != "hidden"))
    options = parser.parse_args(arguments)
    try:
        task, settings = tasks.parse(options.task), settings_from(options)
        names, model = planned(task, options.mechanisms, given(options, ModelConfig))
        with files.locked(options.out):
            study = _begun(options, task, names, model, settings)
            complete = _watched(study, task, settings, options.out)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"experiments.study: {error}", file=sys.stderr)
        return 2
    tables.show(table(study), width=160)
    print(f"{options.out / Study.data}, {options.out / Study.page}")
    return 0 if complete else 130


def _begun(
    options: argparse.Namespace, task: Task, names: list[str], model: dict[str, Any], settings: TrainingSettings
) -> Study:
    path, equal = options.out / Study.data, [name for name in ("steps", "minutes") if getattr(settings, name)]
    meta = begun(
        torch.device(settings.device), task=repr(task), metric=task.metric, mechanisms=names, seeds=options.seeds,
        training=repr(settings), equal=" or ".join(equal), model=model, baselines=task.baselines(),
        data=task.describe(),
    )  # fmt: skip
    meta["command"] = ["python", "-m", "experiments.study", *sys.argv[1:]]
    if options.resume and path.exists():
        return Study.resume(path, meta)
    if path.exists() and not options.restart:
        raise ValueError(f"{path} is a study: continue it (--resume), begin anew (--restart), or name another folder")
    shutil.rmtree(options.out / "cells", ignore_errors=True)
    return Study(meta)


def _watched(study: Study, task: Task, settings: TrainingSettings, out: Path) -> bool:
    """Run with a line for every evaluation; whatever ends it, the record and the picture are written."""

    def watch(says: str, line: dict[str, Any]) -> None:
        if "valid" in line:
            print(f"{says}: {json.dumps(line)}", file=sys.stderr, flush=True)

    study.save(out / Study.data)  # a study that is killed is resumed with these settings only
    complete = False
    with suppress(KeyboardInterrupt):  # between two runs
        complete = run(study, task, settings, out, watch)
    study.finish("complete" if complete else "interrupted")
    study.save(out / Study.data)
    with matplotlib.rc_context(STYLE), files.atomic(out / Study.page) as partial:
        figure(study)[0].savefig(partial, format="svg", metadata={"Date": None})
    return complete


if __name__ == "__main__":
    sys.exit(main())
