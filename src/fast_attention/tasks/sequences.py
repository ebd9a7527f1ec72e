"""Classification of the user's own labelled sequences, from a table or from lines of JSON."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from fast_attention.ops.value import at_least
from fast_attention.tasks.bytes import read
from fast_attention.tasks.lengths import chosen, padded
from fast_attention.tasks.task import Batch, Split, Task, digest, random_for

PAD = 256
TEXTS, LABELS = ("sequence", "text", "sentence", "seq"), ("label", "class", "target", "category")


class Side(NamedTuple):
    """Sequences as bytes, and their classes."""

    rows: list[UInt8[Tensor, "bytes"]]
    labels: Int[Tensor, "rows"]


class Sides(NamedTuple):
    """Training and validation, the names of the classes, and how many lines repeat an earlier sequence."""

    train: Side
    valid: Side
    names: tuple[str, ...]
    doubles: int


@dataclass(frozen=True, repr=False)
class Sequences(Task):
    """Tell the label of a sequence, byte by byte.

    A sequence that stands in the file twice counts once. Longer ones are cut at the end.

    Args:
        path: A ``.csv`` or ``.tsv`` file with a line of headers, or a ``.jsonl`` file of objects.
        text: The column with the sequences; empty for ``sequence``, ``text``, ``sentence`` or ``seq``.
        label: The column with the labels; empty for ``label``, ``class``, ``target`` or ``category``.
        context: The longest sequence, in bytes.
        share: Of each class held out for validation.
        seed: For the split and the order.
    """

    path: str
    text: str = ""
    label: str = ""
    context: int = 512
    share: float = 0.1
    seed: int = 0

    name = "classify"

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 1)
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"Sequences(share={self.share!r}): share must lie between 0 and 1")

    @property
    def vocab_size(self) -> int:
        """The bytes and padding."""
        return 257

    @property
    def length(self) -> int:
        """The longest sequence."""
        return self.context

    @property
    def classes(self) -> int:
        """The different labels."""
        return len(sides(self).names)

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Sequences of about equal length, and their classes."""
        side = sides(self).train if split == "train" else sides(self).valid
        which = chosen(self, split, index, size, tuple(map(len, side.rows)))
        tokens, key_mask = padded([side.rows[i] for i in which], PAD)
        return Batch(tokens, side.labels[which], key_mask)

    def baselines(self) -> dict[str, float]:
        """The commonest class; naive Bayes over the bytes, in whatever order they stand."""
        train, valid, names, _ = sides(self)
        prior = torch.bincount(train.labels, minlength=len(names)).double()
        bags, asked = (
            torch.stack([torch.bincount(row.long(), minlength=256) for row in side.rows]).double()
            for side in (train, valid)
        )
        counts = torch.ones(len(names), 256, dtype=torch.double).index_add_(0, train.labels, bags)
        scores = prior.log() + asked @ (counts / counts.sum(-1, keepdim=True)).log().T
        return {
            "commonest class": (valid.labels == prior.argmax()).double().mean().item(),
            "counts of bytes": (valid.labels == scores.argmax(-1)).double().mean().item(),
        }

    def describe(self) -> dict[str, str]:
        """The classes; sequences, how many are as long as is seen of them, and digest of each side."""
        train, valid, names, doubles = sides(self)
        found = {"classes": ", ".join(names), "repeated sequences left out": f"{doubles:,}"}
        for name, side in (("training", train), ("validation", valid)):
            full = sum(len(row) == self.context for row in side.rows)
            said = f"{len(side.rows):,} sequences, {full:,} of them {self.context} bytes or longer"
            found[name] = f"{said}, SHA-256 {digest(*side.rows, side.labels)}"
        return found


@lru_cache(maxsize=4)
def sides(task: Sequences) -> Sides:
    """Training and validation, each class divided alike.

    Raises:
        ValueError: The file cannot be read, lacks a column, or has too few sequences of a class.
    """
    labelled: dict[bytes, str] = {}
    lines = 0
    for place, text, label in _records(task):
        if not text:
            raise ValueError(f"{place}: the sequence is empty")
        lines += 1
        if labelled.setdefault(text[: task.context], label) != label:
            raise ValueError(f"{place}: the same sequence as before has another label, {label!r}")
    groups: defaultdict[str, list[bytes]] = defaultdict(list)
    for text, label in labelled.items():
        groups[label].append(text)
    if len(groups) < 2:
        raise ValueError(f"{task.path}: {len(groups)} different labels; a classification needs 2 or more")
    names = tuple(sorted(groups))
    parts: tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]] = ([], [])
    for number, name in enumerate(names):
        texts = sorted(groups[name])
        if len(texts) < 2:
            raise ValueError(f"{task.path}: the label {name!r} has 1 sequence; one for each side is needed")
        order = torch.randperm(len(texts), generator=random_for("split", task.seed, name)).tolist()
        held = min(max(1, round(task.share * len(texts))), len(texts) - 1)
        parts[0].extend((texts[i], number) for i in order[held:])
        parts[1].extend((texts[i], number) for i in order[:held])
    train, valid = (_side(part) for part in parts)
    return Sides(train, valid, names, lines - len(labelled))


def _side(part: list[tuple[bytes, int]]) -> Side:
    rows = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text, _ in part]
    return Side(rows, torch.tensor([label for _, label in part]))


def _records(task: Sequences) -> Iterator[tuple[str, bytes, str]]:
    """Place in the file, sequence and label of each record."""
    text = label = ""
    found = False
    for place, record in _rows(Path(task.path)):
        if not found:
            text = _column(task, record, "text", task.text, TEXTS)
            label = _column(task, record, "label", task.label, LABELS)
            found = True
        for column in (text, label):
            if record.get(column) is None or isinstance(record[column], dict | list):
                raise ValueError(f"{place}: no value for {column!r}")
        yield place, str(record[text]).encode(), str(record[label])
    if not found:
        raise ValueError(f"{task.path}: the file has no sequences")


def _column(task: Sequences, record: dict[str, Any], role: str, named: str, usual: tuple[str, ...]) -> str:
    lowered = {column.lower(): column for column in record if isinstance(column, str)}
    names = [named] if named else list(usual)
    for name in names:
        if name in record or name in lowered:
            return name if name in record else lowered[name]
    said = f"no column is called {' or '.join(names)}; there are: {', '.join(lowered.values())}"
    raise ValueError(f"{task.path}: {said}. Name it: Sequences(path=..., {role}=...)")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix not in (".csv", ".tsv", ".jsonl"):
        raise ValueError(f"{path}: the name must end in .csv, .tsv or .jsonl")
    try:
        content = read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if path.suffix == ".jsonl":
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                yield f"{path}, line {number}", _object(path, number, line)
        return
    table = csv.DictReader(
        io.StringIO(content, newline=""), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True
    )
    try:
        for record in table:
            yield f"{path}, line {table.line_num}", record
    except csv.Error as error:
        raise ValueError(f"{path}, line {table.line_num}: {error}") from error


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}, line {number}: not an object such as {{'sequence': ..., 'label': ...}}")
    return found
