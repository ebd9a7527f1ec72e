"""A label for every token of the user's own sequences: secondary structure of proteins, parts of speech, entities."""

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
    """A sequence as bytes, and the number of the label that is asked for at each of them, or ``IGNORED``."""

    tokens: UInt8[Tensor, "bytes"]
    labels: Int[Tensor, "bytes"]


class Sides(NamedTuple):
    """Training and validation, the names of the labels, and how many sequences are left out, by why."""

    train: list[Tagged]
    valid: list[Tagged]
    names: tuple[str, ...]
    left: dict[str, int]


@dataclass(frozen=True, repr=False)
class Tags(Labelled):
    """Tell the label of each token of a sequence.

    Of a FASTA file, half the lines below a header are residues and half are labels, one for each residue. Of a table
    (``.csv``, ``.tsv``, ``.jsonl``) one column holds sequences and one their labels: a character for each character,
    or, where the file's labels have spaces, a word for each word, asked for at the word's last byte. A sequence that
    stands there twice counts once, one with two labellings is left out; longer ones are cut at the end. No validation
    protein of a FASTA file shares 15 residues in a row with a training one.

    Args:
        path: The file.
        text: The column with the sequences; empty for ``sequence``, ``text``, ``sentence``, ``seq``, ``tokens`` or
            ``words``.
        label: The column with the labels; empty for ``labels``, ``tags``, ``structure``, ``sst3``, ``sst8``, ``ss3``,
            ``ss8`` or ``label``.
        context: The longest sequence, in bytes.
        share: Of the sequences held out for validation.
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
        side = sides(self).train if split == "train" else sides(self).valid
        which = chosen(self, split, index, size, tuple(len(row.tokens) for row in side))
        tokens, key_mask = padded([side[i].tokens for i in which], PAD)
        labels, _ = padded([side[i].labels for i in which], IGNORED)
        return Batch(tokens, labels.where(labels == IGNORED, labels + PAD + 1), key_mask)

    def baselines(self) -> dict[str, float]:
        """The commonest label; each byte's commonest label, whatever stands around it."""
        train, valid, names, _ = sides(self)
        (seen, known), (here, asked) = (_asked(side) for side in (train, valid))
        table = torch.bincount(seen * len(names) + known, minlength=256 * len(names)).view(256, -1)
        commonest = table.sum(0).argmax()
        own = torch.where(table.sum(-1) > 0, table.argmax(-1), commonest)
        return {
            "commonest label": (asked == commonest).double().mean().item(),
            "the byte's commonest label": (asked == own[here]).double().mean().item(),
        }

    def describe(self) -> dict[str, str]:
        """The labels, what is left out; sequences, labels and digest of each side."""
        train, valid, names, left = sides(self)
        found = {"labels": ", ".join(names), **{f"{why} left out": f"{count:,}" for why, count in left.items()}}
        for name, side in (("training", train), ("validation", valid)):
            full = sum(len(row.tokens) == self.context for row in side)
            message = (
                f"{len(side):,} sequences, {len(_asked(side)[1]):,} labels, {full:,} of {self.context} bytes or longer"
            )
            found[name] = f"{message}, SHA-256 {digest(*(part for row in side for part in row))}"
        return found

    def remarks(self) -> list[str]:
        """Sequences that have more than one labelling, or share residues in a row with training ones."""
        return [f"{count:,} {why} are left out" for why, count in sides(self).left.items() if count]


@lru_cache(maxsize=4)
def sides(task: Tags) -> Sides:
    """Training and validation.

    Raises:
        ValueError: The file cannot be read, lacks a column, or a label or a token is without its other half.
    """
    rows: dict[str, set[str]] = {}
    places: dict[str, str] = {}
    for place, text, labels in _records(task):
        if not text.strip():
            raise ValueError(f"{place}: the sequence is empty")
        rows.setdefault(text, set()).add(labels)
        places.setdefault(text, place)
    kept = {text: next(iter(found)) for text, found in rows.items() if len(found) == 1}
    by_word = _is_table(task) and any(re.search(r"\s", labels.strip()) for labels in kept.values())
    units = {text: _units(places[text], text, labels, by_word) for text, labels in kept.items()}
    names = tuple(sorted({label for found in units.values() for _, label in found}))
    if len(names) < 2 or len(units) < 2:
        raise ValueError(f"{task.path}: {len(units)} sequences and {len(names)} different labels; 2 of each are needed")
    texts = sorted(units)
    order = torch.randperm(len(texts), generator=random_for("split", task.seed)).tolist()
    held = min(max(1, round(task.share * len(texts))), len(texts) - 1)
    parts = [texts[i] for i in order[held:]], [texts[i] for i in order[:held]]
    fresh = parts[1] if _is_table(task) else _strangers(task, *parts)
    numbers = {name: i for i, name in enumerate(names)}
    train, valid = ([_tagged(task, text, units[text], numbers) for text in part] for part in (parts[0], fresh))
    for name, side in (("training", train), ("validation", valid)):
        if not len(_asked(side)[1]):
            raise ValueError(f"{task.path}: no label for {name} within context={task.context} bytes")
    left = {"sequences with several labellings": len(rows) - len(kept)}
    if not _is_table(task):
        left["validation proteins that share stretches with training ones"] = len(parts[1]) - len(fresh)
    return Sides(train, valid, names, left)


def _is_table(task: Tags) -> bool:
    return Path(task.path).suffix in tables.SUFFIXES


def _records(task: Tags) -> Iterator[tuple[str, str, str]]:
    """Place in the file, sequence and labels of each record."""
    if not _is_table(task):
        yield from _fasta(Path(task.path))
        return
    for place, (text, labels) in tables.records("Tags", task.path, task.columns):
        yield place, text, labels


def _fasta(path: Path) -> Iterator[tuple[str, str, str]]:
    """Records of a header and an even number of lines: residues, then as many labels."""
    lines = [
        (number, line)
        for number, line in enumerate(tables.text_of(path).replace("\r", "").split("\n"), 1)
        if line.strip()
    ]
    starts = [i for i, (_, line) in enumerate(lines) if line.startswith(">")]
    if not lines or starts[:1] != [0]:
        message = "is empty" if not lines else "does not start with a '>' line, as FASTA does, nor end in .csv or .tsv"
        raise ValueError(f"{path}: the file {message}")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        place, below = f"{path}, line {lines[start][0]}", [line for _, line in lines[start + 1 : end]]
        if not below or len(below) % 2:
            raise ValueError(f"{place}: {len(below)} lines below the header; half are residues and half their labels")
        half = len(below) // 2
        residues, labels = "".join(map(str.strip, below[:half])).upper(), "".join(below[half:])
        if strange := re.search(r"[^A-Z*]", residues):
            raise ValueError(f"{place}: {strange.group()!r} is not a residue letter")
        yield place, residues, labels


def _units(place: str, text: str, labels: str, by_word: bool) -> list[tuple[int, str]]:
    """The last character of each labelled token, and its label."""
    ends = [word.end() - 1 for word in re.finditer(r"\S+", text)] if by_word else list(range(len(text)))
    found = labels.split() if by_word else list(labels)
    if len(ends) != len(found):
        kind = "words" if by_word else "characters"
        raise ValueError(
            f"{place}: a sequence of {len(ends)} {kind} and {len(found)} labels; every one needs its label"
        )
    return list(zip(ends, found, strict=True))


def _tagged(task: Tags, text: str, units: list[tuple[int, str]], numbers: dict[str, int]) -> Tagged:
    sizes = torch.tensor([len(letter.encode("utf-8", "surrogatepass")) for letter in text])
    tokens = torch.frombuffer(bytearray(text.encode("utf-8", "surrogatepass")), dtype=torch.uint8)
    labels = torch.full(tokens.shape, IGNORED)
    places = sizes.cumsum(0)[[end for end, _ in units]] - 1
    labels[places] = torch.tensor([numbers[label] for _, label in units])
    return Tagged(tokens[: task.context], labels[: task.context])


def _strangers(task: Tags, train: list[str], candidates: list[str]) -> list[str]:
    """The candidates that share no 15 residues in a row with a training protein."""
    if max(map(len, train)) < KMER or max(map(len, candidates)) < KMER:
        return candidates
    coded = [encoded(text) for text in candidates]
    kept = {id(protein) for protein in unrelated(coded, [encoded(text) for text in train])}
    found = [text for text, protein in zip(candidates, coded, strict=True) if id(protein) in kept]
    if not found:
        raise ValueError(f"{task.path}: every validation protein shares {KMER} residues with a training one")
    return found


def _asked(side: list[Tagged]) -> tuple[Tensor, Tensor]:
    """The bytes at which a label is asked for, and the labels."""
    tokens, labels = (torch.cat(parts) for parts in zip(*side, strict=True))
    return tokens[labels != IGNORED].long(), labels[labels != IGNORED]
