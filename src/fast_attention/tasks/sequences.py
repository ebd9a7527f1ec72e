"""Classification of the user's own labelled sequences, from a CSV table or JSON lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from fast_attention.tasks import tables
from fast_attention.tasks.labelled import PAD, Labelled
from fast_attention.tasks.lengths import chosen, padded
from fast_attention.tasks.task import Batch, Split, digest, random_for

COUNTED = 4096  # sequences whose bytes are counted together


class Side(NamedTuple):
    """The examples of one split: sequences as bytes, and their classes."""

    rows: list[UInt8[Tensor, "bytes"]]
    labels: Int[Tensor, "rows"]


class Excluded(NamedTuple):
    """Numbers of a file's lines that are no distinct examples."""

    repeated: int  # lines with a sequence and a label of an earlier line
    ambiguous: int  # different sequences with more than one label: left out
    alike: int  # sequences with different labels that are equal up to the context's end: kept


class Sides(NamedTuple):
    """Training and validation examples, the names of the classes, and the numbers of excluded lines."""

    train: Side
    valid: Side
    names: tuple[str, ...]
    counts: Excluded


@dataclass(frozen=True, repr=False)
class Sequences(Labelled):
    """Predict the label of a sequence, read byte by byte.

    A sequence that occurs twice in the file counts once; one with two labels is left out, and counted. Sequences are
    compared before longer ones are cropped.

    Args:
        path: A ``.csv`` or ``.tsv`` file with a line of headers, or a ``.jsonl`` file of objects.
        text: The column with the sequences; empty for ``sequence``, ``text``, ``sentence`` or ``seq``.
        label: The column with the labels; empty for ``label``, ``class``, ``target`` or ``category``.
        context: The longest sequence, in bytes.
        share: The fraction of each class held out for validation.
        seed: For the split and the order.
    """

    name = "classify"
    texts = ("sequence", "text", "sentence", "seq")
    labels = ("label", "class", "target", "category")

    @property
    def vocab_size(self) -> int:
        """The bytes and padding."""
        return 257

    @property
    def classes(self) -> int:
        """The different labels."""
        return len(sides(self).names)

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Sequences of about equal length, and their classes."""
        examples = sides(self).train if split == "train" else sides(self).valid
        indices = chosen(self, split, index, size, _lengths(self, split))
        tokens, key_mask = padded([examples.rows[i] for i in indices], PAD)
        return Batch(tokens, examples.labels[indices], key_mask)

    def baselines(self) -> dict[str, float]:
        """The commonest class; naive Bayes over the counts of bytes."""
        train, valid, names, _ = sides(self)
        class_counts = torch.bincount(train.labels, minlength=len(names)).double()
        counts = torch.ones(len(names), 256, dtype=torch.double)
        for byte_counts, labels in _byte_counts(train):
            counts.index_add_(0, labels, byte_counts)
        weights = (counts / counts.sum(-1, keepdim=True)).log().T
        guesses = [(class_counts.log() + byte_counts @ weights).argmax(-1) for byte_counts, _ in _byte_counts(valid)]
        return {
            "commonest class": (valid.labels == class_counts.argmax()).double().mean().item(),
            "counts of bytes": (valid.labels == torch.cat(guesses)).double().mean().item(),
        }

    def describe(self) -> dict[str, str]:
        """The classes, numbers of excluded sequences; sequences, cropped ones and digest of each split."""
        train, valid, names, counts = sides(self)
        description = {"classes": ", ".join(names), "repeated sequences left out": f"{counts.repeated:,}"}
        description["sequences with several labels left out"] = f"{counts.ambiguous:,}"
        description[f"sequences with several labels that differ beyond byte {self.context:,}"] = f"{counts.alike:,}"
        for name, examples in (("training", train), ("validation", valid)):
            at_limit = sum(len(row) == self.context for row in examples.rows)
            message = f"{len(examples.rows):,} sequences, {at_limit:,} of them {self.context} bytes or longer"
            description[name] = f"{message}, SHA-256 {digest(*examples.rows, examples.labels)}"
        return description

    def remarks(self) -> list[str]:
        """Warnings about sequences that have more than one label."""
        counts = sides(self).counts
        remarks = []
        if counts.ambiguous:
            remarks.append(f"{counts.ambiguous:,} sequences have more than one label and are left out")
        if counts.alike:
            remarks.append(
                f"{counts.alike:,} sequences of different labels are alike in the first {self.context:,} "
                "bytes, and no model can tell them apart: context=... reads more"
            )
        return remarks


@lru_cache(maxsize=8)
def _lengths(task: Sequences, split: Split) -> tuple[int, ...]:
    examples = sides(task).train if split == "train" else sides(task).valid
    return tuple(map(len, examples.rows))


@lru_cache(maxsize=4)
def sides(task: Sequences) -> Sides:
    """Read the file and split each class into training and validation.

    Raises:
        ValueError: The file cannot be read, lacks a column, or has too few sequences of a class.
    """
    lines: Counter[tuple[bytes, str]] = Counter()
    for location, (text, label) in tables.records("Sequences", task.path, task.columns):
        if not text:
            raise ValueError(f"{location}: the sequence is empty")
        if not label.strip():
            raise ValueError(f"{location}: the label is empty")
        lines[text.encode("utf-8", "surrogatepass"), label.strip()] += 1
    labels = Counter(text for text, _ in lines)
    ambiguous = {text for text, count in labels.items() if count > 1}
    examples = {(text[: task.context], label): None for text, label in lines if text not in ambiguous}
    times = Counter(text for text, _ in examples)
    repeated = sum(count for (text, _), count in lines.items() if text not in ambiguous) - len(examples)
    groups: defaultdict[str, list[bytes]] = defaultdict(list)
    for text, label in examples:
        groups[label].append(text)
    if len(groups) < 2:
        note = f" ({len(ambiguous):,} sequences with several labels are left out)" if ambiguous else ""
        raise ValueError(f"{task.path}: {len(groups)} different labels{note}; a classification needs 2 or more")
    names = tuple(sorted(groups))
    split_examples: tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]] = ([], [])
    for number, name in enumerate(names):
        texts = sorted(groups[name])
        if len(texts) < 2:
            raise ValueError(f"{task.path}: the label {name[:40]!r} has 1 sequence; one for each side is needed")
        order = torch.randperm(len(texts), generator=random_for("split", task.seed, name)).tolist()
        count = min(max(1, round(task.share * len(texts))), len(texts) - 1)
        split_examples[0].extend((texts[i], number) for i in order[count:])
        split_examples[1].extend((texts[i], number) for i in order[:count])
    train, valid = (_side(part) for part in split_examples)
    alike = sum(count for count in times.values() if count > 1)
    return Sides(train, valid, names, Excluded(repeated, len(ambiguous), alike))


def _byte_counts(side: Side) -> Iterator[tuple[Float[Tensor, "some 256"], Int[Tensor, "some"]]]:
    """How often each byte stands in each of some sequences, and their classes; of all at once it would fill memory."""
    for start in range(0, len(side.rows), COUNTED):
        some = slice(start, start + COUNTED)
        counts = [torch.bincount(row.long(), minlength=256) for row in side.rows[some]]
        yield torch.stack(counts).double(), side.labels[some]


def _side(examples: list[tuple[bytes, int]]) -> Side:
    rows = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text, _ in examples]
    return Side(rows, torch.tensor([label for _, label in examples]))
