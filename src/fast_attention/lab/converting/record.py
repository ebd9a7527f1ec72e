"""The record of a conversion: what was measured at every stage, and what the model costs before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fast_attention.conversion import Conversion
from fast_attention.lab.records import Record

CHECKPOINT = "checkpoint"  # beside the record until the conversion is complete
SOFTMAX = "Softmax()"
STAGES = {
    "original": "original",
    "swapped": "swapped, untrained",
    "transferred": "after the transfer",
    "tuned": "after the fine-tune",
    "exact": "exact for short inputs",
}
FIGURES = {
    "nats_per_token": "nats per token",
    "nats_per_target": "nats per target",
    "bits_per_byte": "bits per byte",
    "against_original": "against the original",
    "sentence_cosine": "cosine of sentences",
    "worst_sentence_cosine": "worst sentence",
    "token_cosine": "cosine of tokens",
    "accuracy": "right answers",
    "same_answer": "the original's answers",
}


@dataclass
class Converted(Record):
    """A conversion, what it was run with, and what the model costs before and after."""

    kind, noun, keys = "convert", "conversion", {"costs": "prices"}
    data, page = "report.json", "report.html"

    conversion: Conversion
    costs: list[dict[str, Any]] = field(default_factory=list)  # see costs.measure

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
        if "sentence_cosine" not in known:  # the loss is nats, of a text or of a task
            bits = self.meta["bits_per_byte_of_a_nat"]
            nats = {"nats_per_target" if known else "nats_per_token": loss}
            known = nats | ({} if bits is None else {"bits_per_byte": loss * bits}) | known
        return {**known, "against_original": loss / original if original else 1.0 if not loss else math.inf}

    def ablations(self, words: str) -> dict[str, dict[str, float]]:
        """Figures by group of the model with a part of its mechanism off, by the words for that."""
        held = self.conversion
        known = {name: held.by_group["original"].get(name) for name in held.by_group.get("original", {})}
        original = held.figures["original"]
        return {name: self._figures(each, known.get(name) or original) for name, each in held.ablations[words].items()}

    @property
    def best(self) -> str:
        """The stage whose weights the model has."""
        return self.conversion.best

    def before(self, name: str) -> str:
        """What a layer of the original runs."""
        runs = self.conversion.runs.get(name, SOFTMAX)
        return "exact attention" if runs == SOFTMAX else runs

    @property
    def untouched(self) -> str:
        """The word for a layer that was not converted."""
        return "exact" if {*self.conversion.runs.values()} <= {SOFTMAX} else "as it was"

    @property
    def stages(self) -> list[str]:
        """The stages that were measured."""
        return [when for when in STAGES if when in self.conversion.figures]
