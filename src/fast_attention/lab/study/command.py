"""``fast-attention study``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention import files
from fast_attention.lab import options
from fast_attention.lab.options import at_work

if TYPE_CHECKING or at_work():
    from fast_attention import tasks
    from fast_attention.lab import inputs, progress
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.learning.train import refused
    from fast_attention.lab.study import page, run
    from fast_attention.lab.study.plan import Plan, named
    from fast_attention.lab.study.record import Study
    from fast_attention.lab.study.run import CELLS
    from fast_attention.lab.surroundings import begun, now
    from fast_attention.lab.tables import say, show
    from fast_attention.training.settings import TrainingSettings, from_toml

RECORD, PAGE = "study.json", "study.html"


def study_command(
    task: Annotated[str, typer.Argument(help="A task's name or expression: mqar, 'Copy(words=15)' (see tasks).")],
    file: options.File = None,
    mechanisms: Annotated[
        list[str] | None,
        typer.Option(help="Names or expressions; A + B for layers that alternate. Two controls are always there."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each mechanism.")] = 3,
    n_steps: options.Steps = None,
    minutes: Annotated[float | None, typer.Option(help="Time for each run: equal time instead of equal steps.")] = None,
    config: options.Config = None,
    batch_size: options.BatchSize = None,
    lr: options.Rate = None,
    device: options.RunDevice = None,
    evaluate_every: options.EvaluateEvery = None,
    width: options.Width = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    positions: options.Positions = None,
    out: Annotated[Path, typer.Option(help=f"Folder for {PAGE}, {RECORD} and the runs.")] = Path("out/study"),
    resume: options.Resume = False,
    restart: options.Restart = False,
    as_json: options.AsJson = False,
) -> int:
    """Train several mechanisms on one task: what each learns, how fast, in how much memory.

    [dim]fast-attention study mqar --mechanisms LinearAttention "Local(window=16)" --seeds 3 --steps 2000[/dim]
    """
    given = dict(locals())
    with refused():
        training, model = ({}, {}) if config is None else from_toml(config)
        if n_steps is not None:
            training["steps"] = n_steps
        elif minutes is not None:
            training |= {"minutes": minutes, "steps": 0}
        training |= {name: given[name] for name in TRAINING if given[name] is not None}
        model |= {name: given[name] for name in MODEL if given[name] is not None}
        if "mechanism" in model or "hidden" in model:
            raise InputError(f"{config}: a study sets [model] mechanism and hidden itself: name --mechanisms")
        plan = Plan.of(
            tasks.parse(f"{task} {file}" if file else task),
            [name for text in mechanisms or [] for name in named(text)], seeds, TrainingSettings(**training), model,
        )  # fmt: skip
        with inputs.alone(out):
            inputs.results([out / RECORD], out, "a study", resume=resume, restart=restart)
            meta = _meta(plan)
            record = Study.resume(out / RECORD, meta) if resume and (out / RECORD).exists() else Study(meta)
            if restart and not resume:
                shutil.rmtree(out / CELLS, ignore_errors=True)
            status = _carry_out(plan, record, out)
    _tell(record, out, as_json)
    return 130 if status == "interrupted" else 0


TRAINING = ("batch_size", "lr", "device", "evaluate_every")
MODEL = ("width", "layers", "heads", "positions")


def _meta(plan: Plan) -> dict[str, Any]:
    return begun(
        inputs.device(plan.settings.device),
        task=repr(plan.task),
        metric=plan.task.metric,
        mechanisms=list(plan.mechanisms),
        seeds=plan.seeds,
        training=repr(plan.settings),
        model=plan.model,
        baselines=plan.task.baselines(),
        data=plan.task.describe(),
    )


def _carry_out(plan: Plan, record: Study, out: Path) -> str:
    """Run under a progress bar; whatever has been trained is kept, and a run that was stopped goes on where it was."""
    with progress.measured(len(plan.cells)) as (update, _):

        def watch(who: str, line: dict[str, Any]) -> None:
            if "result" in line:
                _save(record, out)
            elif "step" in line:
                done = min(plan.settings.done(line["step"], line["seconds"]), 1.0)
                update(f"{who}  step {line['step']:,}", len(record.results) + done)

        status = run.study(plan, record, out, watch)
    record.meta["status"] = status
    record.meta["finished"] = now()
    _save(record, out)
    return status


def _save(record: Study, out: Path) -> None:
    record.save(out / RECORD)
    files.write(out / PAGE, page.html(record))


def _tell(record: Study, out: Path, as_json: bool) -> None:
    if as_json:
        print(record.to_json())
    else:
        show(page.table(record), width=160)
    if record.meta["status"] == "interrupted":
        say("interrupted; the same command with --resume resumes it.")
    say(f"\nPictures: {(out / PAGE).resolve()}\nRecord: {(out / RECORD).resolve()}")
