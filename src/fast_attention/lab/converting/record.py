"""The record of a conversion: what was measured at every stage, and what the model costs before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fast_attention.conversion import Conversion
from fast_attention.lab.records import Record

RECORD = "report.json"
STAGES = {
    "original": "original",
    "swapped": "swapped, untrained",
    "transferred": "after the transfer",
    "tuned": "after the fine-tune",
}
SPELT = {
    "nats_per_token": "nats per token",
    "bits_per_byte": "bits per byte",
    "against_original": "against the original",
    "sentence_cosine": "cosine of sentences",
    "worst_sentence_cosine": "worst sentence",
    "token_cosine": "cosine of tokens",
}


@dataclass
class Converted(Record):
    """A conversion, what it was run with, and what the model costs before and after."""

    kind, noun = "convert", "conversion"

    conversion: Conversion
    prices: list[dict[str, Any]] = field(default_factory=list)  # see prices.measure

    def parts(self) -> dict[str, Any]:
        """Its fields, and the figures in the words of ``SPELT``."""
        return {**super().parts(), "figures": {when: self.figures(when) for when in self.stages}}

    def figures(self, when: str) -> dict[str, float]:
        """What a reader wants to know of a stage, by the names in ``SPELT``."""
        known = dict(self.conversion.figures[when])
        loss, original = known.pop("loss"), self.conversion.figures["original"]["loss"]
        if not known:  # a language model
            known = {"nats_per_token": loss, "bits_per_byte": loss * self.meta["bits_per_byte_of_a_nat"]}
        return {**known, "against_original": loss / original}

    @property
    def stages(self) -> list[str]:
        """The stages that were measured."""
        return [when for when in STAGES if when in self.conversion.figures]
