"""The record of a command: its settings and rows of numbers, as one JSON file that holds its own checksum."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args, get_type_hints

from fast_attention import files
from fast_attention.lab.environment import load_average, timestamp
from fast_attention.lab.refusals import InputError

FORMAT = 2  # of all records; those of format 1 hold no checksum, and some no schema
Status = Literal["measured", "over budget", "too large", "refused", "failed", "not reached"]
Pass = Literal["forward", "training"]
PASSES: tuple[Pass, ...] = ("forward", "training")
EXACT = "exact attention"


@dataclass
class Record:
    """A command's settings and results: a field for each kind of rows, which subclasses add."""

    kind: ClassVar[str]  # as the file's schema has it
    noun: ClassVar[str]  # as messages call it
    same: ClassVar[tuple[str, ...]] = ()  # what of ``meta`` may not differ when it is resumed
    keys: ClassVar[Mapping[str, str]] = {}  # fields that the file calls otherwise; "": not in the file
    data: ClassVar[str]  # the names of its file and of its page
    page: ClassVar[str]

    meta: dict[str, Any]

    def parts(self) -> dict[str, Any]:
        """The content of the file, without its schema and checksum."""
        names = {each.name: self.keys.get(each.name, each.name) for each in fields(self)}
        return {key: getattr(self, name) for name, key in names.items() if key}

    def to_json(self) -> str:
        """``{"schema": ..., "meta": ..., ..., "sha256": ...}``; numbers that are not finite become null."""
        return sealed(self.kind, self.parts())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of ``to_json``.

        Raises:
            ValueError: It is no such record, or damaged.
            Newer: A later version of this library wrote it.
        """
        parts, kinds = opened(text, cls.kind, f"the {cls.noun}"), get_type_hints(cls)
        keys = {each.name: cls.keys.get(each.name, each.name) for each in fields(cls)}
        try:
            return cls(**{name: _revived(parts[key], kinds[name]) for name, key in keys.items() if key})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no record of a {cls.noun}: {error}") from error

    @classmethod
    def read(cls, path: Path, otherwise: str = "{path} is no record of a {noun}: {error}") -> Self:
        """The record in a file; or an ``InputError`` that says ``otherwise``, where it is none or damaged."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(otherwise.format(path=path, noun=cls.noun, error=error)) from error

    @classmethod
    def resume(cls, path: Path, meta: dict[str, Any]) -> Self:
        """The record of a command that was stopped, with ``meta`` as it is now; not of one with other settings."""
        record = cls.read(path, "--resume: {path} holds no {noun} to resume ({error})")
        before = record.meta
        other = [f"{key} was {before.get(key)}, is {meta[key]}" for key in cls.same if before.get(key) != meta[key]]
        if other:
            raise InputError(f"--resume: {path} is of another {cls.noun}: {'; '.join(other)}")
        earlier = {name: before[name] for name in ("started", "seconds", "parts") if name in before}
        record.meta = {**meta, **earlier, "resumed": [*before.get("resumed", []), meta["started"]]}
        return record

    def finish(self, status: str) -> None:
        """Note how and when the command ended."""
        self.meta |= {"status": status, "finished": timestamp(), "load_average_after": load_average()}

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        files.write(path, self.to_json() + "\n")

    def leave(self, folder: Path, draw: Callable[[Self], str]) -> None:
        """Write the record into a folder, and then its page, which may be stopped; each whole or not at all."""
        self.save(folder / self.data)
        files.write(folder / self.page, draw(self))


def _revived(value: Any, kind: Any) -> Any:
    """A value from JSON as a field of this kind: a dataclass, a list of them, or the value itself.

    What a dataclass held in an earlier version, and no more, is left out.
    """
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**{each.name: value[each.name] for each in fields(kind) if each.name in value})
    inner: Any = next(iter(get_args(kind)), None)
    return [inner(**row) for row in value] if is_dataclass(inner) and isinstance(inner, type) else value


def sealed(kind: str, parts: Mapping[str, Any], indent: int | None = 1) -> str:
    """A record's file: its parts with the schema before and the checksum behind them."""
    content = plain({"schema": f"fast-attention {kind} {FORMAT}", **parts})
    return json.dumps({**content, "sha256": checksum(content)}, indent=indent, allow_nan=False)


def opened(text: str, kind: str, what: str) -> dict[str, Any]:
    """The parts of a record whose schema names this ``kind``, and whose checksum is right.

    Raises:
        ValueError: It is no record of this kind, or damaged.
        Newer: A later version of this library wrote it.
    """
    content = files.decoded(text)
    if not isinstance(content, dict) or not isinstance(content.get("meta"), dict):
        raise ValueError(f"no record of 'fast-attention {kind}'")
    saved, schema = content.pop("sha256", None), content.get("schema", f"fast-attention {kind} 1")
    old = schema == f"fast-attention {kind} 1"
    if not old:
        known = {"format": schema, "version": content["meta"].get("fast_attention")}
        files.readable(known, f"fast-attention {kind} {FORMAT}", what)
    if not (old and saved is None) and saved != (actual := checksum(content)):
        raise ValueError(f"{what} is damaged: its SHA-256 is {actual}, and {saved} was saved")
    content.pop("schema", None)
    return content


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of a record's content, whatever blanks and order its file has."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(value: Any) -> Any:
    """A value for JSON: dataclasses as objects, tuples as lists, numbers that are not finite as None."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Times(NamedTuple):
    """Times of one pass in milliseconds, and their ratios to the baseline's in the same rounds: below 1 is faster."""

    ms: float | None
    best_ms: float | None
    ratio: float | None
    best_ratio: float | None
    low: float | None
    high: float | None


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
    group: str = ""  # the competitors that ran in the same rounds, where not all did

    def times(self, which: Pass) -> Times:
        """The times of one pass."""
        return Times(*(getattr(self, f"{which}_{name}") for name in Times._fields))

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the most expensive pass that was measured."""
        return self.forward_bytes if self.training_bytes is None else self.training_bytes


@dataclass
class Timed(Record):
    """A record of times and memory."""

    cells: list[Cell] = field(default_factory=list)

    @property
    def mechanisms(self) -> list[str]:
        """Measured mechanisms, in order, without exact attention."""
        return [name for name in dict.fromkeys(cell.mechanism for cell in self.cells) if name != EXACT]

    def cell(self, mechanism: str, length: int) -> Cell | None:
        """The cell of a mechanism and a length."""
        return next((c for c in self.cells if (c.mechanism, c.length) == (mechanism, length)), None)

    def ratios(self, mechanism: str, which: Pass = "forward") -> dict[int, float]:
        """Time relative to the baseline's by length, where it was measured."""
        cells = sorted((c for c in self.cells if c.mechanism == mechanism), key=lambda cell: cell.length)
        return {cell.length: ratio for cell in cells if (ratio := cell.times(which).ratio) is not None}

    def missing(self) -> list[str]:
        """Why cells are empty: one line for every mechanism and reason."""
        lengths: dict[tuple[str, str], list[str]] = {}
        for cell in self.cells:
            if cell.status != "measured":
                lengths.setdefault((cell.mechanism, f"{cell.status}: {cell.note}"), []).append(f"{cell.length:,}")
        return [f"{name} at {', '.join(at)} tokens: {why}" for (name, why), at in lengths.items()]

    def not_reached(self, names: Iterable[str], lengths: Iterable[int], reason: str) -> None:
        """Give every mechanism a cell at every length; those that were not reached say why."""
        for name, length in itertools.product(names, lengths):
            if self.cell(name, length) is None:
                self.cells.append(Cell(name, length))
        for cell in self.cells:
            if cell.status == "not reached":
                cell.note = reason


@dataclass
class Error:
    """Error of one mechanism on real tensors of one length: a row per layer, a number per head."""

    mechanism: str
    length: int
    against: str
    output: list[list[float]] = field(default_factory=list)  # relative RMS of the outputs
    note: str = ""
    visible_fraction: float | None = None  # of the visible pairs, those that it weighs; None: it weighs no pairs

    def __post_init__(self) -> None:
        for row in self.output:  # JSON knows no infinity
            row[:] = [math.inf if value is None else value for value in row]

    def summary(self) -> tuple[float, float] | None:
        """Median and worst over all heads of all layers; None where nothing was measured."""
        values = sorted(value if math.isfinite(value) else math.inf for row in self.output for value in row)
        return (values[len(values) // 2], values[-1]) if values else None


@dataclass
class Comparison(Timed):
    """All of one comparison with exact attention."""

    kind, noun, keys = "compare", "comparison", {"cells": "rows"}
    data, page = "records.json", "report.html"

    errors: list[Error] = field(default_factory=list)

    @property
    def length(self) -> int | None:
        """The one length at which error and speed are compared: the greatest with both, else with errors."""
        known = {error.length for error in self.errors if error.output}
        timed = {length for length in known if length in self.ratios(EXACT)}
        return max(timed or known, default=None)

    def error(self, mechanism: str, length: int | None = None) -> Error | None:
        """The error at ``length``, or at the one length at which error and speed are compared."""
        at = length or self.length
        known = (error for error in self.errors if (error.mechanism, error.length) == (mechanism, at) and error.output)
        return next(known, None)
