"""Teachers of a conversion: what the original makes of a text that it reads whole, or in chunks of its own length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.conversion import reads
from fast_attention.value import Value, at_least

Batch = dict[str, Tensor]


class Targets(NamedTuple):
    """What a converted encoder is to give for a batch."""

    states: tuple[Tensor, ...]  # hidden states before the first block and behind every one, (B, L, D) each
    sentences: Tensor  # embeddings, (B, D)


@dataclass(frozen=True, repr=False)
class Chunks(Value):
    """The original reads a long text in chunks; its embedding is the mean of theirs, weighted by their tokens.

    That is what people do today with texts that are longer than a model's positions, and it takes time in proportion
    to the text. The hidden states of single tokens are those of the chunk reads. Texts of one chunk are read as ever.

    Args:
        tokens: Of a chunk, the tokenizer's own marks included, as many as the original was trained to read.
        before: Marks that the tokenizer puts before a text, which every chunk gets.
        behind: Marks that it puts behind one.
    """

    tokens: int = 512
    before: int = 1
    behind: int = 1

    def __post_init__(self) -> None:
        at_least(self, "before", self.before, 0)
        at_least(self, "behind", self.behind, 0)
        at_least(self, "tokens", self.tokens, self.before + self.behind + 1)

    @torch.no_grad()
    def read(self, original: Any, batch: Batch) -> Targets:
        """The targets of a batch; padding gets zeros."""
        if "input_ids" not in batch:
            raise ValueError(f"teacher={self!r} cuts input_ids into chunks, and a batch has {', '.join(batch)}")
        ids, mask = batch["input_ids"], reads.tokens(batch)
        rows = [row if mask is None else row[mask[i]] for i, row in enumerate(ids)]
        read = [self._row(original, row) for row in rows]
        padded = [tuple(F.pad(x, (0, 0, 0, ids.shape[1] - len(x))) for x in states) for states, _ in read]
        return Targets(
            tuple(torch.stack(each) for each in zip(*padded, strict=True)),
            torch.stack([sentence for _, sentence in read]),
        )

    def _row(self, original: Any, row: Tensor) -> Targets:
        """The targets of one text, without padding."""
        end = len(row) - self.behind
        contents = row[self.before : end].split(self.tokens - self.before - self.behind)
        parts: list[tuple[Tensor, ...]] = []
        for number, content in enumerate(contents):
            chunk = torch.cat([row[: self.before], content, row[end:]])[None]
            states = reads.hidden(original, {"input_ids": chunk, "attention_mask": torch.ones_like(chunk)})
            first = 0 if number == 0 else self.before
            last = chunk.shape[1] - (0 if number == len(contents) - 1 else self.behind)
            parts.append((*(x[0, first:last] for x in states), states[-1][0].mean(0)))
        weights = row.new_tensor([len(content) for content in contents], dtype=torch.float32) / (end - self.before)
        *layers, sentences = zip(*parts, strict=True)
        return Targets(tuple(torch.cat(each) for each in layers), weights @ torch.stack(sentences).float())


@dataclass(frozen=True, repr=False)
class Whole(Value):
    """The original reads every text as the converted model does: by exact attention."""

    @torch.no_grad()
    def read(self, original: Any, batch: Batch) -> Targets:
        """The targets of a batch."""
        states = reads.hidden(original, batch)
        return Targets(states, reads.pooled(states[-1], reads.tokens(batch)))


Teacher = Literal["original"] | Chunks


def of(teacher: Teacher) -> Whole | Chunks:
    """The teacher that was asked for.

    Raises:
        ValueError: It is neither ``"original"`` nor ``Chunks(...)``.
    """
    if isinstance(teacher, Chunks):
        return teacher
    if teacher == "original":
        return Whole()
    raise ValueError(f"teacher={teacher!r}: give 'original' or Chunks(tokens=...)")


def whole(teacher: Teacher, model: Any) -> None:
    """Raise a ``ValueError`` where a teacher that reads chunks was asked for and the model has a task of its own."""
    if isinstance(of(teacher), Chunks):
        raise ValueError(
            f"teacher={teacher!r} is for encoders that give embeddings; {type(model).__name__} is judged by its own "
            "task: teacher='original'"
        )
