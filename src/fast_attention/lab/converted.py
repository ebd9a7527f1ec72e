"""The record of a conversion: figures of every stage, what the model costs before and after; its tables, its page."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fast_attention.conversion import Conversion
from fast_attention.lab import pages
from fast_attention.lab.pages import Section, Words
from fast_attention.lab.records import Record
from fast_attention.lab.tables import Table, bytes_of, count, factor, fixed, milliseconds

STAGES = {
    "original": "original", "swapped": "swapped, untrained", "transferred": "after the transfer",
    "tuned": "after the fine-tune", "exact": "exact for short inputs",
}  # fmt: skip
FIGURES = {
    "nats_per_token": "nats per token", "bits_per_byte": "bits per byte", "against_original": "against the original",
    "sentence_cosine": "cosine of sentences", "worst_sentence_cosine": "worst sentence",
    "token_cosine": "cosine of tokens",
}  # fmt: skip


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
        pages.run(meta, facts),
        pages.again(meta, record.data, "The model: fast_attention.from_pretrained on this folder."),
    ]
    done = f"{meta['model']}, {len(result.converted)} of {len(result.layers)} layers to {result.mechanism}"
    return pages.page("convert", sections, [*pages.partial(meta, "conversion"), pages.where(meta, done)])
