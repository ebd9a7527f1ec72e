"""Reads and measures for the command ``convert``; its record: figures of every stage, costs, tables and page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fast_attention import clock
from fast_attention.conversion import Conversion
from fast_attention.conversion.goals import run
from fast_attention.counting import peak_bytes
from fast_attention.integrations import extend
from fast_attention.lab import capture, inputs, loading, pages, texts
from fast_attention.lab.inputs import InputError
from fast_attention.lab.pages import Section, Words
from fast_attention.lab.records import Record
from fast_attention.lab.tables import Table, bytes_of, count, factor, fixed, milliseconds
from fast_attention.lab.texts import Corpus

CHECKPOINT = "checkpoint"  # beside the record until the conversion is complete
LONGEST = 512  # tokens of a passage, unless --length says more
ROUNDS, PATIENCE = 20, 6.0  # of timing both models in turns; seconds after which no further round begins
SLOWEST = 60.0  # seconds of a pass that is not begun any more
STAGES = {
    "original": "original", "swapped": "swapped, untrained", "transferred": "after the transfer",
    "tuned": "after the fine-tune", "exact": "exact for short inputs",
}  # fmt: skip
FIGURES = {
    "nats_per_token": "nats per token", "bits_per_byte": "bits per byte", "against_original": "against the original",
    "sentence_cosine": "cosine of sentences", "worst_sentence_cosine": "worst sentence",
    "token_cosine": "cosine of tokens",
}  # fmt: skip


def opened(name: str, device: torch.device, longest: int | None, tokenizer: Any) -> tuple[Any, int, str]:
    """A model, the tokens that it was trained to read, and how it came to read ``longest``, if that was asked for."""
    model = loading.load(name).float().to(device)
    learnt, extension = capture.context(model.config, tokenizer) or LONGEST, ""
    if longest is not None:
        with inputs.refusing(where=f"--positions {longest}: "):
            extension = str(extend(model, longest, tokenizer=tokenizer))
    return model, learnt, extension


def corpora(names: list[str] | None, held_out: str | None) -> tuple[list[Corpus], Corpus]:
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


def watch(update: Callable[..., None], say: Callable[[str], None], line: dict[str, Any]) -> None:
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


def measured_costs(models: dict[str, Any], lengths: list[int], positions: int | None) -> list[dict[str, Any]]:
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


@dataclass
class Converted(Record):
    """A conversion, what it was run with, and what the model costs before and after."""

    kind, noun, keys = "convert", "conversion", {"costs": "prices"}
    same = ("model", "mechanism", "settings", "teacher", "texts")
    data, page = "report.json", "report.html"

    conversion: Conversion
    costs: list[dict[str, Any]] = field(default_factory=list)  # a row for each model and length

    def parts(self) -> dict[str, Any]:
        """The content of the file: the fields, and the figures of every stage."""
        return {**super().parts(), "figures": {when: self.figures(when) for when in self.stages}}

    def figures(self, when: str) -> dict[str, float]:
        """Figures of a stage, by the names in ``FIGURES``."""
        return self._figures(self.conversion.figures[when], self.conversion.figures["original"])

    def by_group(self, when: str) -> dict[str, dict[str, float]]:
        """Figures of each group of held-out passages."""
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


def gain(record: Converted) -> str:
    """Gain on texts that were not trained on, in steps and losses."""
    result = record.conversion
    where = (
        "on texts of another source" if len(result.by_group.get(result.best, {})) > 1 else "on the held-out passages"
    )
    losses = {when: result.held_out_loss(when) for when in record.stages}
    if result.best != "swapped":
        first, last = losses["swapped"], losses[result.best]
        return f"{result.steps:,} steps; {where} the loss fell from {first:.4f}, untrained, to {last:.4f}."
    tried = "".join(f", {STAGES[when]} {losses[when]:.4f}" for when in record.stages[2:])
    least = f"the loss is {losses['swapped']:.4f} without training{tried}"
    return f"{result.steps:,} steps, and nothing was gained {where}: {least}. The model is the untrained swap."


def every(record: Converted) -> list[Table]:
    """All tables that have rows."""
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
    """Mechanism of every layer, and its error at every stage."""
    result, rows = record.conversion, []
    for name in result.layers:
        runs = result.mechanism if name in result.converted else f"exact attention: {result.kept[name]}"
        rows.append([name, runs, *(fixed(errors.get(name), ".3f") for errors in result.errors.values())])
    return Table(["layer", "runs", *(f"error, {STAGES[when]}" for when in result.errors)], rows, left=[1])


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
    meta, result = record.meta, record.conversion
    facts = {
        "Model": f"{meta['model']}, {len(result.layers)} attention layers, {len(result.converted)} converted",
        "Mechanism": result.mechanism, "Positions": meta["positions"] or "the model's own", "Teacher": meta["teacher"],
        "Judged by": f"{result.goal}, {meta['passages']} passages of up to {meta['length']} tokens that no training "
        f"saw; stages are compared on {meta['held_out']['name']}",
        "Loss": "2 - the mean cosine of sentences" if record.conversion.goal.startswith("like") else "nats per token",
        "Text": meta["text"], "Training": f"{meta['settings']}, {meta['batch_size']} passages a batch",
    }  # fmt: skip
    sections = [
        Section("Quality", [Words(gain(record), "lead"), *(table for table in quality(record) if table.rows)]),
        Section("Layer by layer", [layers(record)]),
        Section("Costs of one sequence", [costs(record)] if record.costs else []),
    ]
    done = f"{meta['model']}, {len(result.converted)} of {len(result.layers)} layers to {result.mechanism}"
    return pages.page_of(
        record, sections, facts, done, more="The model: fast_attention.from_pretrained on this folder."
    )  # fmt: skip
