"""The record of a conversion: what was measured, with what, as one JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fast_attention.conversion import Conversion
from fast_attention.lab import records
from fast_attention.lab.inputs import InputError

SCHEMA = "fast-attention convert 1"
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
class Ledger:
    """A conversion, what it was run with, and what the model costs before and after."""

    meta: dict[str, Any]
    conversion: Conversion
    prices: list[dict[str, Any]] = field(default_factory=list)  # see prices.measure

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

    def to_json(self) -> str:
        """``{"schema": ..., "meta": ..., "conversion": ..., "figures": ..., "prices": [...]}``."""
        figures = {when: self.figures(when) for when in self.stages}
        held = {"schema": SCHEMA, "meta": self.meta, "conversion": asdict(self.conversion), "figures": figures}
        return json.dumps(records.plain({**held, "prices": self.prices}), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """The inverse of ``to_json``."""
        held = records.opened(text, SCHEMA, "the conversion")
        return cls(held["meta"], Conversion(**held["conversion"]), held["prices"])


def read(path: Path) -> Ledger:
    """The record in a file.

    Raises:
        InputError: It is none.
    """
    try:
        return Ledger.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no record of a conversion: {error}") from error
