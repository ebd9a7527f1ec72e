"""What a comparison leaves behind: rows of numbers and what they were measured with, as one JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fast_attention import __version__, files

Status = Literal["measured", "over budget", "refused", "failed", "not reached"]
EXACT = "exact attention"


@dataclass
class Cell:
    """One mechanism at one length. Times are medians in milliseconds; None: not measured, and ``note`` says why."""

    mechanism: str
    length: int
    status: Status = "not reached"
    note: str = ""
    rounds: int = 0
    forward_ms: float | None = None
    forward_best_ms: float | None = None
    forward_ratio: float | None = None  # to exact attention in the same round, median over rounds; < 1 is faster
    forward_best_ratio: float | None = None  # fastest against fastest
    forward_low: float | None = None  # the ratio's quartiles over the rounds
    forward_high: float | None = None
    training_ms: float | None = None  # forward and backward
    training_best_ms: float | None = None
    training_ratio: float | None = None
    training_best_ratio: float | None = None
    training_low: float | None = None
    training_high: float | None = None
    forward_bytes: int | None = None  # peak beyond the inputs
    training_bytes: int | None = None
    operations: int | None = None  # of the forward pass
    training_operations: int | None = None
    weight_bytes: int | None = None
    state_bytes: int | None = None  # of decoding, after this many tokens
    group: str = ""  # with whom it ran in the same rounds, where not everybody did

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the dearest pass that was measured."""
        return self.forward_bytes if self.training_bytes is None else self.training_bytes


@dataclass
class Error:
    """Error of one mechanism on real tensors of one length: a row per layer, a number per head."""

    mechanism: str
    length: int
    against: str
    output: list[list[float]] = field(default_factory=list)  # relative RMS of the outputs
    matrix: list[list[float]] | None = None  # relative Frobenius norm of the attention matrix
    note: str = ""

    def summary(self, which: Literal["output", "matrix"] = "output") -> tuple[float, float] | None:
        """Median and worst over all heads of all layers; None where nothing was measured."""
        rows = self.output if which == "output" else self.matrix
        values = sorted(value if math.isfinite(value) else math.inf for row in rows or [] for value in row)
        return (values[len(values) // 2], values[-1]) if values else None


class Matrices(NamedTuple):
    """Attention matrices (L, L) of one head, to look at; not part of the JSON."""

    where: str
    exact: Tensor
    approximate: dict[str, Tensor]


@dataclass
class Record:
    """All of one comparison."""

    meta: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)
    matrices: Matrices | None = None

    @property
    def mechanisms(self) -> list[str]:
        """What was compared, in order, without exact attention."""
        return [name for name in dict.fromkeys(cell.mechanism for cell in self.cells) if name != EXACT]

    def cell(self, mechanism: str, length: int) -> Cell | None:
        """The cell of a mechanism and a length."""
        return next((c for c in self.cells if (c.mechanism, c.length) == (mechanism, length)), None)

    def error(self, mechanism: str) -> Error | None:
        """The error at the greatest length at which it was measured."""
        own = [error for error in self.errors if error.mechanism == mechanism and error.output]
        return max(own, key=lambda error: error.length, default=None)

    def to_json(self) -> str:
        """``{"meta": ..., "rows": [...], "errors": [...]}``; numbers that are not finite become null."""
        rows = {"meta": self.meta, "rows": self.cells, "errors": self.errors}
        return json.dumps(plain(rows), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The inverse of ``to_json``."""
        held = json.loads(text)
        errors = [Error(**error) for error in held["errors"]]
        for error in errors:
            for rows in (error.output, error.matrix or []):
                rows[:] = [[math.inf if value is None else value for value in row] for row in rows]
        return cls(held["meta"], [Cell(**row) for row in held["rows"]], errors)


def opened(text: str, schema: str, what: str) -> dict[str, Any]:
    """The object that a record's JSON spells.

    Raises:
        ValueError: It is no record of this schema.
        Newer: A later version of this library wrote it.
    """
    held = files.decoded(text)
    if not isinstance(held, dict) or not isinstance(held.get("meta"), dict):
        raise ValueError(f"not a record of {schema!r}")
    files.readable({"format": held.get("schema"), "version": held["meta"].get("fast_attention")}, schema, what)
    return held


def plain(value: Any) -> Any:
    """As JSON has it: cells as objects, tuples as lists, numbers that are not finite as None."""
    if isinstance(value, Cell | Error):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def surroundings(device: torch.device) -> dict[str, Any]:
    """Versions and hardware, for the record."""
    return {
        "fast_attention": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": load_average(),
    }


def load_average() -> list[float] | None:
    """How many processes wanted the cores over the last 1, 5 and 15 minutes, this one among them."""
    return [round(load, 2) for load in os.getloadavg()] if sys.platform != "win32" else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree this runs from, with ``+`` where files were changed; None outside of one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    ask = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
