"""The record of a benchmark: ceilings, checks, times, memory and decoding; what is done need not run again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fast_attention.lab.bench.competitors import Competitor
from fast_attention.lab.records import Timed


@dataclass
class Row:
    """A competitor in the record, with the result of its check. ``faults`` of a peer are its own."""

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
    def of(cls, competitor: Competitor) -> Row:
        """The row of a competitor, before its check."""
        names = ("name", "family", "kind", "is_causal", "owner", "reference")
        row = cls(*(getattr(competitor, name) for name in names))
        if competitor.peer:
            row.note, row.same = competitor.peer.note, competitor.peer.same
        return row


@dataclass
class PeakMemory:
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
class Benchmark(Timed):
    """All of one benchmark."""

    kind, noun, keys = "bench", "benchmark", {"memory": "weights"}
    same = ("heads", "head_dim", "batch", "dtype", "device", "hardware", "threads", "torch", "commit", "backward")
    data, page = "bench.json", "bench.html"

    rows: list[Row] = field(default_factory=list)
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    memory: list[PeakMemory] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # what need not run again when resumed
    summary: dict[str, Any] = field(default_factory=dict)  # what the figures say, written out for readers of the JSON

    def row(self, name: str) -> Row | None:
        """The row of a name."""
        return next((row for row in self.rows if row.name == name), None)

    @classmethod
    def resume(cls, path: Path, meta: dict[str, Any]) -> Self:
        """Read a record to resume it; groups that were interrupted are dropped."""
        record = super().resume(path, meta)
        record.cells = [cell for cell in record.cells if time_key(cell.length, cell.group) in record.done]
        return record


def time_key(length: int, group: str) -> str:
    """The name of a timed group in ``done``."""
    return f"time {length} {group}"
