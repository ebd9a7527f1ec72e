"""Token classification of the user's own sequences: secondary structure, parts of speech, entities."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from fast_attention.tasks import tables
from fast_attention.tasks.labelled import PAD, Labelled
from fast_attention.tasks.lengths import chosen, padded
from fast_attention.tasks.proteins import KMER, encoded, unrelated
from fast_attention.tasks.task import IGNORED, Batch, Split, digest, random_for


class Tagged(NamedTuple):
    """A sequence as bytes, and the class of the label at each byte, or ``IGNORED``."""

    tokens: UInt8[Tensor, "bytes"]
    labels: Int[Tensor, "bytes"]


class Sides(NamedTuple):
    """Training and validation examples, the names of the labels, and numbers of left-out sequences by reason."""

    train: list[Tagged]
    valid: list[Tagged]
    names: tuple[str, ...]
    left_out: dict[str, int]


@dataclass(frozen=True, repr=False)
class Tags(Labelled):
    """Predict the label of each token of a sequence.

    Of a FASTA file, half the lines below a header are residues and half are labels, one for each residue. Of a table
    (``.csv``, ``.tsv``, ``.jsonl``) one column holds sequences and one their labels: a character for each character,
    or, where the file's labels have spaces, a word for each word, predicted at the word's last byte. Longer
    sequences are cropped; what occurs twice then counts once, and what has two labellings is left out. No validation
    protein of a FASTA file shares 15 residues in a row with a training one.

    Args:
        path: The file.
        text: The column with the sequences; empty for ``sequence``, ``text``, ``sentence``, ``seq``, ``tokens`` or
            ``words``.
        label: The column with the labels; empty for ``labels``, ``tags``, ``structure``, ``sst3``, ``sst8``, ``ss3``,
            ``ss8`` or ``label``.
        context: The longest sequence, in bytes.
        share: The fraction of the sequences held out for validation.
        seed: For the split and the order.
    """

    name = "tag"
    texts = ("sequence", "text", "sentence", "seq", "tokens", "words")
    labels = ("labels", "tags", "structure", "sst3", "sst8", "ss3", "ss8", "label")

    @property
    def vocab_size(self) -> int:
        """The bytes, padding and the labels, which are predicted as tokens of their own."""
        return PAD + 1 + len(sides(self).names)

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Sequences of about equal length, and their labels."""
        examples = sides(self).train if split == "train" else sides(self).valid
        indices = chosen(self, split, index, size, _lengths(self, split))
        tokens, key_mask = padded([examples[i].tokens for i in indices], PAD)
        labels, _ = padded([examples[i].labels for i in indices], IGNORED)
        return Batch(tokens, labels.where(labels == IGNORED, labels + PAD + 1), key_mask)

    def baselines(self) -> dict[str, float]:
        """The commonest label; each byte's commonest label, without context."""
        train, valid, names, _ = sides(self)
        (train_bytes, train_labels), (valid_bytes, valid_labels) = (_targets(side) for side in (train, valid))
        table = torch.bincount(train_bytes * len(names) + train_labels, minlength=256 * len(names)).view(256, -1)
        commonest = table.sum(0).argmax()
        by_byte = torch.where(table.sum(-1) > 0, table.argmax(-1), commonest)
        return {
            "commonest label": (valid_labels == commonest).double().mean().item(),
            "the byte's commonest label": (valid_labels == by_byte[valid_bytes]).double().mean().item(),
        }

    def describe(self) -> dict[str, str]:
        """The labels, numbers of left-out sequences; sequences, labels and digest of each split."""
        train, valid, names, left_out = sides(self)
        description = {"labels": ", ".join(names)}
        description |= {f"{why} left out": f"{count:,}" for why, count in left_out.items()}
        for name, examples in (("training", train), ("validation", valid)):
            at_limit = sum(len(row.tokens) == self.context for row in examples)
            message = (
                f"{len(examples):,} sequences, {len(_targets(examples)[1]):,} labels, {at_limit:,} of {self.context}"
            )
            sha = digest(*(tensor for row in examples for tensor in row))
            description[name] = f"{message} bytes or longer, SHA-256 {sha}"
        return description

    def remarks(self) -> list[str]:
        """Warnings about sequences with more than one labelling, or related to training ones."""
        return [f"{count:,} {why} are left out" for why, count in sides(self).left_out.items() if count]


@lru_cache(maxsize=8)
def _lengths(task: Tags, split: Split) -> tuple[int, ...]:
    examples = sides(task).train if split == "train" else sides(task).valid
    return tuple(len(row.tokens) for row in examples)


@lru_cache(maxsize=4)
def sides(task: Tags) -> Sides:
    """Read the file and split it into training and validation.

    Raises:
        ValueError: The file cannot be read, lacks a column, or has a label without a token or the reverse.
    """
    rows: dict[str, set[str]] = {}
    locations: dict[str, str] = {}
    for location, text, labels in _records(task):
        if not text.strip():
            raise ValueError(f"{location}: the sequence is empty")
        rows.setdefault(text, set()).add(labels)
        locations.setdefault(text, location)
    kept = {text: next(iter(labels_found)) for text, labels_found in rows.items() if len(labels_found) == 1}
    by_word = _is_table(task) and any(re.search(r"\s", labels.strip()) for labels in kept.values())
    units = {text: _units(locations[text], text, labels, by_word) for text, labels in kept.items()}
    names = tuple(sorted({label for labels_found in units.values() for _, label in labels_found}))
    if len(names) < 2 or len(units) < 2:
        raise ValueError(f"{task.path}: {len(units)} sequences and {len(names)} different labels; 2 of each are needed")
    numbers = {name: i for i, name in enumerate(names)}
    tagged = {text: _tagged(task, text, units[text], numbers) for text in sorted(units)}
    texts, ambiguous = _distinct(tagged)
    if len(texts) < 2:
        raise ValueError(f"{task.path}: {len(texts)} different sequences within context={task.context} bytes, not 2")
    order = torch.randperm(len(texts), generator=random_for("split", task.seed)).tolist()
    count = min(max(1, round(task.share * len(texts))), len(texts) - 1)
    parts = [texts[i] for i in order[count:]], [texts[i] for i in order[:count]]
    valid_texts = parts[1] if _is_table(task) else _without_relatives(task, *parts)
    train, valid = ([tagged[text] for text in part] for part in (parts[0], valid_texts))
    for name, side in (("training", train), ("validation", valid)):
        if not len(_targets(side)[1]):
            raise ValueError(f"{task.path}: no label for {name} within context={task.context} bytes")
    left_out = {"sequences with several labellings": len(rows) - len(kept) + ambiguous}
    if not _is_table(task):
        left_out["validation proteins that share stretches with training ones"] = len(parts[1]) - len(valid_texts)
    return Sides(train, valid, names, left_out)


def _is_table(task: Tags) -> bool:
    return Path(task.path).suffix in tables.SUFFIXES


def _records(task: Tags) -> Iterator[tuple[str, str, str]]:
    """Yield each record's location in the file, sequence and labels."""
    if not _is_table(task):
        yield from _fasta(Path(task.path))
        return
    for location, (text, labels) in tables.records("Tags", task.path, task.columns):
        yield location, text, labels


def _fasta(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield records of FASTA: a header and an even number of lines, residues and then as many labels."""
    lines = [
        (number, line)
        for number, line in enumerate(tables.text_of(path).replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1)
        if line.strip()
    ]
    starts = [i for i, (_, line) in enumerate(lines) if line.startswith(">")]
    if not lines or starts[:1] != [0]:
        message = "is empty" if not lines else "does not start with a '>' line, as FASTA does, nor end in .csv or .tsv"
        raise ValueError(f"{path}: the file {message}")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        at, below = f"{path}, line {lines[start][0]}", [line for _, line in lines[start + 1 : end]]
        if not below or len(below) % 2:
            raise ValueError(f"{at}: {len(below)} lines below the header; half are residues and half their labels")
        half = len(below) // 2
        residues, labels = "".join(map(str.strip, below[:half])).upper(), "".join(below[half:])
        if wrong := re.search(r"[^A-Z*]", residues):
            raise ValueError(f"{at}: {wrong.group()!r} is not a residue letter")
        yield at, residues, labels


def _units(location: str, text: str, labels: str, by_word: bool) -> list[tuple[int, str]]:
    """The index of each labelled token's last character, and its label."""
    ends = [word.end() - 1 for word in re.finditer(r"\S+", text)] if by_word else list(range(len(text)))
    label_list = labels.split() if by_word else list(labels)
    if len(ends) != len(label_list):
        kind = "words" if by_word else "characters"
        raise ValueError(
            f"{location}: a sequence of {len(ends)} {kind} and {len(label_list)} labels; every one needs its label"
        )
    return list(zip(ends, label_list, strict=True))


def _tagged(task: Tags, text: str, units: list[tuple[int, str]], numbers: dict[str, int]) -> Tagged:
    sizes = torch.tensor([len(letter.encode("utf-8", "surrogatepass")) for letter in text])
    tokens = torch.frombuffer(bytearray(text.encode("utf-8", "surrogatepass")), dtype=torch.uint8)
    labels = torch.full(tokens.shape, IGNORED)
    positions = sizes.cumsum(0)[[end for end, _ in units]] - 1
    labels[positions] = torch.tensor([numbers[label] for _, label in units])
    return Tagged(tokens[: task.context], labels[: task.context])


def _distinct(tagged: dict[str, Tagged]) -> tuple[list[str], int]:
    """One of the sequences that are equal as far as they are read, and how many have different labels there."""
    alike: dict[bytes, dict[bytes, str]] = {}
    for text, (tokens, labels) in tagged.items():
        alike.setdefault(tokens.numpy().tobytes(), {}).setdefault(labels.numpy().tobytes(), text)
    texts = [text for texts in alike.values() if len(texts) == 1 for text in texts.values()]
    return texts, len(alike) - len(texts)


def _without_relatives(task: Tags, train: list[str], candidates: list[str]) -> list[str]:
    """The candidates that share no 15 residues in a row with a training protein."""
    if max(map(len, train)) < KMER or max(map(len, candidates)) < KMER:
        return candidates
    tokens = [encoded(text) for text in candidates]
    unrelated_ids = {id(protein) for protein in unrelated(tokens, [encoded(text) for text in train])}
    left = [text for text, protein in zip(candidates, tokens, strict=True) if id(protein) in unrelated_ids]
    if not left:
        raise ValueError(f"{task.path}: every validation protein shares {KMER} residues with a training one")
    return left


def _targets(side: list[Tagged]) -> tuple[Tensor, Tensor]:
    """The bytes that have a label, and the labels."""
    tokens, labels = (torch.cat(parts) for parts in zip(*side, strict=True))
    return tokens[labels != IGNORED].long(), labels[labels != IGNORED]
