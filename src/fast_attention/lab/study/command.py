"""``fast-attention study``: trains several mechanisms on one task."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import at_work

if TYPE_CHECKING or at_work():
    from fast_attention import tasks
    from fast_attention.lab import inputs, progress
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.study import page, run
    from fast_attention.lab.study.plan import Plan, budget, named
    from fast_attention.lab.study.record import Study
    from fast_attention.lab.study.run import CELLS
    from fast_attention.lab.surroundings import begun
    from fast_attention.lab.tables import present
    from fast_attention.training.loop import Diverged
    from fast_attention.training.settings import TrainingSettings


def study_command(
    task: Annotated[str, typer.Argument(help="A task's name or expression: mqar, 'Copy(words=15)' (see tasks).")],
    file: options.File = None,
    mechanisms: Annotated[
        list[str] | None,
        typer.Option(help="Names or expressions; A + B for layers that alternate. Two controls are always there."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each mechanism.")] = 3,
    n_steps: options.Steps = None,
    minutes: Annotated[float | None, typer.Option(help="Time for each run, evaluations included.")] = None,
    clock: options.Clock = None,
    equal: Annotated[
        str | None, typer.Option(help="steps or minutes: what every run has as much of. Default: whichever is given.")
    ] = None,
    config: options.Config = None,
    batch_size: options.BatchSize = None,
    lr: options.Rate = None,
    device: options.RunDevice = None,
    evaluate_every: options.EvaluateEvery = None,
    width: options.Width = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    positions: options.Positions = None,
    conv: options.Conv = None,
    out: Annotated[Path, typer.Option(help="Folder for study.html, study.json and the runs.")] = Path("out/study"),
    resume: options.Resume = False,
    restart: options.Restart = False,
    as_json: options.AsJson = False,
) -> int:
    """Train several mechanisms on one task: what each learns, how fast, in how much memory.

    [dim]fast-attention study mqar --mechanisms LinearAttention "Local(window=16)" --seeds 3 --steps 2000[/dim]
    """
    given = dict(locals())
    with inputs.refusing(TypeError, Diverged):
        training, model = inputs.run_settings(given)
        if "mechanism" in model or "hidden" in model:
            raise InputError(f"{config}: a study sets [model] mechanism and hidden itself: name --mechanisms")
        plan = Plan.of(
            tasks.parse(f"{task} {file}" if file else task),
            [name for text in mechanisms or [] for name in named(text)], seeds, TrainingSettings(**training), model,
        )  # fmt: skip
        bound = budget(equal, plan.settings)
        with inputs.alone(out):
            path = out / Study.data
            inputs.results([path], out, "a study", resume=resume, restart=restart)
            meta = _meta(plan, bound)
            record = Study.resume(path, meta) if resume and path.exists() else Study(meta)
            if restart and not resume:
                shutil.rmtree(out / CELLS, ignore_errors=True)
            status = _carry_out(plan, record, out)
    present(record, out, as_json, *page.tables(record), width=160)
    return 130 if status == "interrupted" else 0


def _meta(plan: Plan, bound: str) -> dict[str, Any]:
    return begun(
        inputs.device(plan.settings.device),
        task=repr(plan.task),
        metric=plan.task.metric,
        mechanisms=list(plan.mechanisms),
        seeds=plan.seeds,
        training=repr(plan.settings),
        equal=bound,
        model=plan.model,
        baselines=plan.task.baselines(),
        data=plan.task.describe(),
    )


def _carry_out(plan: Plan, record: Study, out: Path) -> str:
    """Run under a progress bar; whatever has been trained is kept, and a run that was stopped is resumed."""
    with progress.measured(len(plan.cells)) as (update, _):

        def watch(cell: str, line: dict[str, Any]) -> None:
            if "result" in line:
                record.leave(out, page.html)
            elif "step" in line:
                done = min(plan.settings.done(line["step"], line["seconds"]), 1.0)
                update(f"{cell}  step {line['step']:,}", len(record.results) + done)

        if not (out / Study.data).exists():
            record.leave(out, page.html)  # a run that is stopped is resumed with the settings that stand there only
        status = progress.until_stopped(lambda: run.study(plan, record, out, watch))
    record.finish(status)
    record.leave(out, page.html)
    return status
