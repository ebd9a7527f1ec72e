"""Classification of the user's own labelled sequences, from a table or from lines of JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from fast_attention.tasks import tables
from fast_attention.tasks.labelled import PAD, Labelled
from fast_attention.tasks.lengths import chosen, padded
from fast_attention.tasks.task import Batch, Split, digest, random_for


class Side(NamedTuple):
    """Sequences as bytes, and their classes."""

    rows: list[UInt8[Tensor, "bytes"]]
    labels: Int[Tensor, "rows"]


class Counts(NamedTuple):
    """What of a file is no example of its own."""

    repeated: int  # lines with a sequence and a label that stood there before
    torn: int  # different sequences with more than one label: left out
    alike: int  # sequences with different labels that differ only beyond what is seen of them: kept


class Sides(NamedTuple):
    """Training and validation, the names of the classes, and what of the file is no example of its own."""

    train: Side
    valid: Side
    names: tuple[str, ...]
    counts: Counts


@dataclass(frozen=True, repr=False)
class Sequences(Labelled):
    """Tell the label of a sequence, byte by byte.

    A sequence that stands in the file twice counts once; one with two labels is left out, and counted. Sequences are
    compared whole; then longer ones are cut at the end.

    Args:
        path: A ``.csv`` or ``.tsv`` file with a line of headers, or a ``.jsonl`` file of objects.
        text: The column with the sequences; empty for ``sequence``, ``text``, ``sentence`` or ``seq``.
        label: The column with the labels; empty for ``label``, ``class``, ``target`` or ``category``.
        context: The longest sequence, in bytes.
        share: Of each class held out for validation.
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
        """The classes, what is left out; sequences, how many are cut, and digest of each side."""
        train, valid, names, counts = sides(self)
        found = {"classes": ", ".join(names), "repeated sequences left out": f"{counts.repeated:,}"}
        found["sequences with several labels left out"] = f"{counts.torn:,}"
        found[f"sequences with several labels that differ beyond byte {self.context:,}"] = f"{counts.alike:,}"
        for name, side in (("training", train), ("validation", valid)):
            full = sum(len(row) == self.context for row in side.rows)
            message = f"{len(side.rows):,} sequences, {full:,} of them {self.context} bytes or longer"
            found[name] = f"{message}, SHA-256 {digest(*side.rows, side.labels)}"
        return found

    def remarks(self) -> list[str]:
        """Sequences that have more than one label."""
        counts = sides(self).counts
        message = []
        if counts.torn:
            message.append(f"{counts.torn:,} sequences have more than one label and are left out")
        if counts.alike:
            message.append(
                f"{counts.alike:,} sequences of different labels are alike in the first {self.context:,} bytes, and no "
                "model can tell them apart: context=... reads more"
            )
        return message


@lru_cache(maxsize=4)
def sides(task: Sequences) -> Sides:
    """Training and validation, each class divided alike.

    Raises:
        ValueError: The file cannot be read, lacks a column, or has too few sequences of a class.
    """
    lines: Counter[tuple[bytes, str]] = Counter()
    for place, (text, label) in tables.records("Sequences", task.path, task.columns):
        if not text:
            raise ValueError(f"{place}: the sequence is empty")
        lines[text.encode("utf-8", "surrogatepass"), label.strip()] += 1
    labels = Counter(text for text, _ in lines)
    torn = {text for text, count in labels.items() if count > 1}
    kept = {(text[: task.context], label): None for text, label in lines if text not in torn}
    seen = Counter(text for text, _ in kept)
    repeated = sum(count for (text, _), count in lines.items() if text not in torn) - len(kept)
    groups: defaultdict[str, list[bytes]] = defaultdict(list)
    for text, label in kept:
        groups[label].append(text)
    if len(groups) < 2:
        left = f" ({len(torn):,} sequences with several labels are left out)" if torn else ""
        raise ValueError(f"{task.path}: {len(groups)} different labels{left}; a classification needs 2 or more")
    names = tuple(sorted(groups))
    parts: tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]] = ([], [])
    for number, name in enumerate(names):
        texts = sorted(groups[name])
        if len(texts) < 2:
            raise ValueError(f"{task.path}: the label {name[:40]!r} has 1 sequence; one for each side is needed")
        order = torch.randperm(len(texts), generator=random_for("split", task.seed, name)).tolist()
        held = min(max(1, round(task.share * len(texts))), len(texts) - 1)
        parts[0].extend((texts[i], number) for i in order[held:])
        parts[1].extend((texts[i], number) for i in order[:held])
    train, valid = (_side(part) for part in parts)
    alike = sum(count for count in seen.values() if count > 1)
    return Sides(train, valid, names, Counts(repeated, len(torn), alike))


def _side(part: list[tuple[bytes, int]]) -> Side:
    rows = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text, _ in part]
    return Side(rows, torch.tensor([label for _, label in part]))
