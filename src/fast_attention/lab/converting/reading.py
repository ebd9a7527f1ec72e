"""Reads texts or proteins in passages: batches to train on by number, and groups of passages that are held out."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fast_attention.lab.converting.passages import Batch, Passage, Passages, spread
from fast_attention.lab.corpus import Corpus
from fast_attention.lab.inputs import InputError

HELD = 0.1  # fraction of a source's tokens that are never trained on: the last ones
PASSAGES = 24  # at most, of each kind that is held out
TOKENS = 16_384  # at most, of each kind that is held out, if that leaves LEAST passages
LEAST = 3
LENGTHS = (512, 2048, 8192)  # of the passages with which a text of another source judges
SHORT, SHORT_ROWS = 128, 8  # tokens of the longest of the short ones, and how many of them share a batch
ROWS = 16  # passages of a training batch, at most, unless more of the longest are asked for
STRIDE = 1_000_003  # between the batches of two seeds; torch takes 32 bits


class Reading:
    """Passages of up to ``length`` tokens, the tokenizer's own marks at both ends included.

    Args:
        corpora: What is trained on, but for the end of each.
        tokenizer: The model's.
        length: Tokens of a passage, at most.
        size: Passages of that length in a training batch; of shorter ones there are more, up to as many tokens.
        seed: Another one draws other batches.
        shortest: Passages to train on have log-uniform lengths from here to ``length``; None: all that one.
        judge: A text of another source, of which nothing is trained on: bits per byte are its bytes.

    Attributes:
        groups: Held-out batches by what they are: ``"short"``, ``"other text, 512"`` and so on of the judge, and
            ``"trained text, 512"`` of the ends of what is trained on.
        choosing: Other passages of those ends.
    """

    def __init__(
        self, corpora: Sequence[Corpus], tokenizer: Any, length: int, size: int, seed: int, *,
        shortest: int | None = None, judge: Corpus | None = None,
    ) -> None:  # fmt: skip
        self.corpora, self.judge = [*corpora], judge
        self.passages, self.length, self.size, self.seed = Passages(tokenizer), length, size, seed
        content = self.passages.content(length)
        self.shortest = length if shortest is None else min(max(shortest, self.passages.special_tokens + 1), length)
        read = [self.passages.documents(corpus) for corpus in corpora]
        apart = [_apart(documents) for documents in read]
        self.documents = [document for training, _ in apart for document in training]
        self.ends = list(itertools.accumulate(map(len, self.documents)))
        usual = length if judge is None else min(length, LENGTHS[0])
        cut = (self.passages.cut(document, usual) for _, held in apart for document in held)
        ends = spread([*itertools.chain(*cut)], 2 * PASSAGES)
        if not self.ends or self.ends[-1] < content or len(ends) < 2:
            known = sum(map(len, itertools.chain(*read)))
            raise InputError(
                f"{self.name} has {known:,} tokens, of which the last tenth is held out: too few for passages of "
                f"{length}; give a longer one, or a smaller --length"
            )
        self.groups = {} if judge is None else self._judged(judge)
        self.groups[f"trained text, {usual}"] = self.passages.batches(ends[::2], size)
        self.choosing = self.passages.batches(ends[1::2], size)
        self.tokens_per_byte = _density(corpora, read)
        if judge is not None:
            self.tokens_per_byte = _density([judge], [self.passages.documents(judge)])

    @property
    def name(self) -> str:
        """What is trained on, in words."""
        return "; ".join(corpus.name for corpus in self.corpora)

    @property
    def held_out(self) -> list[Batch]:
        """The batches of all groups."""
        return [*itertools.chain(*self.groups.values())]

    def batch(self, number: int) -> Batch:
        """Batch number i of the training passages: they begin anywhere, as ``seed`` and i say."""
        generator = torch.Generator().manual_seed(self.seed * STRIDE + number)
        longest = self._length(generator, self.length)
        rows = max(self.size, min(self.size * self.length // longest, ROWS))
        lengths = [longest, *(self._length(generator, longest) for _ in range(rows - 1))]
        return self.passages.batch([self._drawn(generator, self.passages.content(each)) for each in lengths])

    def _length(self, generator: torch.Generator, longest: int) -> int:
        """A length between the shortest and ``longest``, every octave as likely as another."""
        if self.shortest >= longest:
            return longest
        fraction = float(torch.rand((), generator=generator))
        return round(self.shortest * (longest / self.shortest) ** fraction)

    def _drawn(self, generator: torch.Generator, content: int) -> Passage:
        at = int(torch.randint(self.ends[-1], (), generator=generator))
        which = bisect.bisect_right(self.ends, at)
        document = self.documents[which]
        start = min(at - (self.ends[which] - len(document)), max(len(document) - content, 0))
        return document[start : start + content]

    def _judged(self, judge: Corpus) -> dict[str, list[Batch]]:
        """Groups of a text that is not trained on: short passages, and one group for every length."""
        document = [*itertools.chain(*self.passages.documents(judge))]
        lengths = [length for length in LENGTHS if length <= self.length] or [self.length]
        if len(document) < 2 * lengths[-1]:
            raise InputError(
                f"--judge {judge.name} has {len(document):,} tokens: too few for two passages of {lengths[-1]}; give a "
                "longer one, or a smaller --length"
            )
        short = spread(self.passages.sentences(judge, min(SHORT, self.length)), PASSAGES)
        groups = {"short": self.passages.batches(short, SHORT_ROWS)}
        for length in lengths:
            count = max(min(PASSAGES, TOKENS // length), LEAST)
            passages = spread(self.passages.cut(document, length), count)
            groups[f"other text, {length}"] = self.passages.batches(passages, self.size)
        return groups


def _density(corpora: Sequence[Corpus], read: Sequence[list[Passage]]) -> float:
    """Tokens per byte of text."""
    tokens = sum(map(len, itertools.chain(*read)))
    return tokens / sum(corpus.facts["bytes"] for corpus in corpora)


def _apart(documents: list[Passage]) -> tuple[list[Passage], list[Passage]]:
    """Split documents: those to train on, and the last ones, or the end of a single one, that are held out."""
    if len(documents) == 1:
        cut = round((1 - HELD) * len(documents[0]))
        return [documents[0][:cut]], [documents[0][cut:]]
    cut = max(round((1 - HELD) * len(documents)), 1)
    return documents[:cut], documents[cut:]
