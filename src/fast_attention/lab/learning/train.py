"""``fast-attention train``: trains a small model on a task."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fast_attention import files
from fast_attention.lab import options
from fast_attention.lab.options import at_work

if TYPE_CHECKING or at_work():
    from fast_attention import tasks
    from fast_attention.lab import inputs, progress, records, tables
    from fast_attention.lab.converting.record import CHECKPOINT, Converted
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.learning import curve, grid
    from fast_attention.lab.surroundings import surroundings
    from fast_attention.nn.models import ModelConfig
    from fast_attention.tasks.needle import Needle
    from fast_attention.tasks.task import Task
    from fast_attention.training import journal, run_folder, steps
    from fast_attention.training.loop import Diverged, Outcome, train
    from fast_attention.training.processes import LostProcess
    from fast_attention.training.run_folder import CURVE, RESULT
    from fast_attention.training.settings import TrainingSettings


def train_command(
    task: Annotated[
        str | None,
        typer.Argument(help="A task's name or expression: copy, 'Copy(words=15)' (see tasks). --resume: the run's."),
    ] = None,
    file: options.File = None,
    mechanism: Annotated[
        list[str] | None, typer.Option(help="A mechanism; several go to the layers in turn. Default: Softmax.")
    ] = None,
    config: options.Config = None,
    n_steps: options.Steps = None,
    minutes: Annotated[float | None, typer.Option(help="Time to spend, instead of or beside --steps.")] = None,
    clock: options.Clock = None,
    batch_size: options.BatchSize = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches to a step. Default: 1.")] = None,
    lr: options.Rate = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    device: options.RunDevice = None,
    seed: Annotated[int | None, typer.Option(help="For weights and dropout. Default: 0.")] = None,
    evaluate_every: options.EvaluateEvery = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints. Default: by time.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many evaluations without a new best.")] = None,
    fsdp: Annotated[bool | None, typer.Option("--fsdp", help="Under torchrun: shard the weights (FSDP2).")] = None,
    sequence_parallel: Annotated[
        int | None, typer.Option(help="Under torchrun: processes that hold one sequence, each some of its tokens.")
    ] = None,
    width: options.Width = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    max_len: Annotated[int | None, typer.Option(help="Longest sequence. Default: the task's.")] = None,
    positions: options.Positions = None,
    conv: options.Conv = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout probability. Default: 0.")] = None,
    reversible: Annotated[bool | None, typer.Option("--reversible", help="Reversible blocks.")] = None,
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("out/train"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in the folder; options that are not given are its own.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew over the run in the folder; with --resume, if it must be.")
    ] = False,
) -> int:
    """Train a small model of any mechanism; SIGTERM and Ctrl-C save and end it, --resume resumes it to the bit.

    [dim]fast-attention train copy --mechanism LinearAttention --steps 500 --out out/copy[/dim]
    [dim]fast-attention train --out out/copy --resume[/dim]
    [dim]fast-attention train classify FILE.csv --minutes 5[/dim]
    """
    given = dict(locals())
    with inputs.refusing(TypeError, Diverged):
        training, model = inputs.run_settings(given)
        if mechanism:
            model["mechanism"] = [repr(each) for text in mechanism for each in inputs.mechanisms([text])]
        held = run_folder.of(out, lambda words: None) if resume else None
        if held is not None:
            training = {**held.settings, **training}
            model = {**asdict(held.config), **model}
        task = task or (held.task if held is not None else None)
        if task is None:
            missing = f"{out} holds no run to resume: name the task" if resume else "name a task"
            raise InputError(f"{missing}, e.g. fast-attention train copy")
        settings, goal = TrainingSettings(**training), tasks.parse(f"{task} {file}" if file else task)
        if held is not None and repr(goal) != held.task:
            raise InputError(f"{out} holds a run with task {held.task}, not {goal!r}: it cannot be resumed so")
        chosen = steps.config_for(goal, **model)
        goal.batch("valid", 0, 1)  # data that will not do are refused before a folder is made
        for words in goal.remarks():
            print(f"{goal.name}: {words}", file=sys.stderr)
        if any((out / name).exists() for name in (CHECKPOINT, Converted.data)):
            raise InputError(f"--out {out} holds a conversion: name another folder")
        first = os.environ.get("RANK", "0") == "0"
        if first:
            inputs.folder(out)
        try:
            outcome = _carry_out(goal, chosen, settings, out, resume, restart)
        except LostProcess as error:
            if str(error):
                print(f"fast-attention: {error}", file=sys.stderr, flush=True)
            os._exit(1)  # the group's threads may wait for the one that is gone
        if first:
            _tell(goal, chosen, settings, outcome, out)
    return 130 if outcome.status == "interrupted" else 0


def _carry_out(
    task: Task, config: ModelConfig, settings: TrainingSettings, out: Path, resume: bool, restart: bool
) -> Outcome:
    """Train under a progress bar: step, loss, best, tokens per second, time left."""
    with progress.measured() as (update, say):
        shown: dict[str, str] = {}

        def watch(line: dict[str, Any]) -> None:
            if "message" in line:
                say(line["message"])
                return
            if "loss" in line:
                shown["loss"] = f"loss {line['loss']:.4g}"
                shown["speed"] = f"{line['tokens_per_second']:,.0f} tokens/s"
            if "valid" in line:
                shown["valid"] = f"validation {curve.in_words(line['valid'], task.metric)}"
            done = settings.done(line["step"], line["seconds"])
            update("  ".join([f"step {line['step']:,}", *shown.values()]), min(done, 1.0))

        return train(task, config, settings, out, resume=resume, restart=restart, watch=watch)


def _tell(task: Task, config: ModelConfig, settings: TrainingSettings, outcome: Outcome, out: Path) -> None:
    """Print the table, and write the picture and the record into the folder."""
    say = Console(stderr=True)
    if outcome.status == "interrupted":
        tables.say(f"interrupted; saved at step {outcome.step:,}. The same command with --resume resumes it.")
        return
    with say.status("baselines"):
        baselines = task.baselines()
    mechanisms = ", ".join(dict.fromkeys(config.mechanisms))
    log = journal.read(out)
    files.write(out / CURVE, curve.drawn(log, task, baselines, f"{task!r}, {mechanisms}").svg)
    result = {
        "command": ["fast-attention", *sys.argv[1:]],
        "task": repr(task),
        "metric": task.metric,
        "model": asdict(config),
        "settings": asdict(settings),
        "outcome": outcome._asdict(),
        "baselines": baselines,
        "data": task.describe(),
        "curve": [{key: line[key] for key in ("step", "seconds", "valid")} for line in log if "valid" in line],
        **surroundings(inputs.device(settings.device)),
    }
    if isinstance(task, Needle):
        with say.status("needles at every depth"):
            result["recalled"] = grid.recalled(out / "model", task, settings)
    files.write(out / RESULT, records.sealed("train", result) + "\n")
    spent = f"{outcome.parameters:,} parameters, {outcome.step:,} steps, {outcome.seconds:.0f} s, {outcome.status}"
    print(f"{task!r}, {mechanisms}: {spent}")
    tables.show(curve.table(outcome, task, baselines), width=120)
    if "recalled" in result:
        tables.show(grid.table(result["recalled"]), width=120)
    tables.say(f"\nModel: {(out / 'model').resolve()}\nCurve: {(out / CURVE).resolve()}")
