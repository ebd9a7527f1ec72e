"""What a benchmark leaves behind: ceilings, checks, cells, memory and decoding as one JSON file that can be resumed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fast_attention.lab import records
from fast_attention.lab.bench.entrants import Entrant
from fast_attention.lab.inputs import InputError
from fast_attention.lab.records import Cell, Record

SCHEMA = "fast-attention bench 1"
SAME = ("heads", "head_dim", "batch", "dtype", "device", "hardware", "threads", "torch", "commit", "backward")


@dataclass
class Row:
    """An entrant as it stands in the record, with what its check found. ``faults`` of a peer are its own."""

    name: str
    family: str
    kind: str
    is_causal: bool
    owner: str
    reference: str
    note: str = ""
    check: str = "not checked"  # or right, wrong, faulty (a peer's broken law), missing (not installed)
    faults: list[str] = field(default_factory=list)
    same: bool = True  # a peer that computes the same function as ours, by design and by its check

    @classmethod
    def of(cls, entrant: Entrant) -> Row:
        """The row of an entrant, before its check."""
        note = entrant.peer.note if entrant.peer else ""
        e = entrant
        same = entrant.peer is None or entrant.peer.same
        return cls(e.name, e.family, e.kind, e.is_causal, e.owner, e.reference, note, same=same)


@dataclass
class Weight:
    """Peak memory of one pass in a fresh process: the growth of its resident set beyond weights and inputs."""

    name: str
    length: int
    forward_bytes: int | None = None
    training_bytes: int | None = None
    essential_bytes: int = 0  # of q, k, v and the output (of input and output where whole tokens go in)
    note: str = ""


@dataclass
class Step:
    """Decoding one token at a position; seconds are medians over the rounds."""

    name: str
    batch: int
    position: int
    seconds: float | None = None
    state_bytes: int | None = None
    note: str = ""


@dataclass
class Ledger(Record):
    """All of one benchmark."""

    rows: list[Row] = field(default_factory=list)
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # what need not run again when resumed
    summary: dict[str, Any] = field(default_factory=dict)  # what the figures say, written out for readers of the JSON

    def row(self, name: str) -> Row | None:
        """The row of a name."""
        return next((row for row in self.rows if row.name == name), None)

    def to_json(self) -> str:
        """Numbers that are not finite become null."""
        held = {name: getattr(self, name) for name in ("meta", "ceilings", "summary", "done")}
        for name in ("rows", "cells", "weights", "steps"):
            held[name] = [asdict(each) for each in getattr(self, name)]
        return json.dumps(records.plain({"schema": SCHEMA, **held}), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """The inverse of ``to_json``."""
        held = records.opened(text, SCHEMA, "the benchmark")
        return cls(
            held["meta"],
            [Cell(**cell) for cell in held["cells"]],
            rows=[Row(**row) for row in held["rows"]],
            ceilings=held["ceilings"],
            weights=[Weight(**weight) for weight in held["weights"]],
            steps=[Step(**step) for step in held["steps"]],
            done=held["done"],
            summary=held["summary"],
        )


def resume(path: Path, meta: dict[str, Any]) -> Ledger:
    """The ledger of a benchmark that was stopped, to go on with; what was cut short in the middle is dropped.

    Raises:
        InputError: There is none, or it was measured with other settings.
    """
    try:
        ledger = Ledger.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--resume: {path} holds no benchmark to go on with ({error})") from error
    other = [f"{key} was {ledger.meta.get(key)}, is {meta[key]}" for key in SAME if ledger.meta.get(key) != meta[key]]
    if other:
        raise InputError(f"--resume: {path} was measured with other settings: {'; '.join(other)}")
    before = {name: ledger.meta[name] for name in ("started", "seconds") if name in ledger.meta}
    ledger.meta = {**meta, **before, "resumed": [*ledger.meta.get("resumed", []), meta["started"]]}
    whole = set(ledger.done)
    ledger.cells = [cell for cell in ledger.cells if time_key(cell.length, cell.group) in whole]
    return ledger


def time_key(length: int, group: str) -> str:
    """How a timed group is called in ``done``."""
    return f"time {length} {group}"
