"""Reads texts in passages of token numbers: batches to train on by number, and groups of passages that are held out."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fast_attention.lab.corpus import Corpus
from fast_attention.lab.inputs import InputError

HELD = 0.1  # fraction of a source's tokens that are never trained on: the last ones
PASSAGES = 24  # at most, of each kind that is held out
TOKENS = 16_384  # at most, of each kind that is held out, if that leaves LEAST passages
LEAST = 3
SHORTEST = 32  # tokens of a passage to train on, unless the longest are shorter
LENGTHS = (512, 2048, 8192)  # of the passages with which a text of another source judges
SHORT, SHORT_ROWS = 128, 8  # tokens of the longest of the short ones; how many, of different lengths, share a batch
ROWS = 16  # passages of a training batch, at most, unless more of the longest are asked for
STRIDE = 1_000_003  # between the batches of two seeds; torch takes 32 bits
Batch = dict[str, Tensor]
Passage = list[int]


class Passages:
    """Passages with the tokenizer's own marks at both ends, ``prefix`` and ``suffix``.

    Args:
        tokenizer: The model's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bare, marked = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
        at = next((i for i in range(len(marked)) if marked[i : i + len(bare)] == bare), 0)
        self.prefix, self.suffix = marked[:at], marked[at + len(bare) :]
        self.special_tokens = len(self.prefix) + len(self.suffix)
        self.padding = int(tokenizer.pad_token_id or 0)

    def document(self, corpus: Corpus) -> Passage:
        """The tokens of all documents of a corpus, joined."""
        text = "\n\n".join(text for _, text in corpus.documents)
        return corpus.numbers(self.tokenizer, text, "a document", add_special_tokens=False, verbose=False)

    def cut(self, document: Passage, length: int) -> list[Passage]:
        """The passages of a document, one after the other; a rest at the end only where nothing else is."""
        content = self.content(length)
        passages = [document[i : i + content] for i in range(0, len(document) - content + 1, content)]
        return passages or [document]

    def content(self, length: int) -> int:
        """How many tokens of a document a passage of ``length`` holds; ``InputError`` if it holds none."""
        if length <= self.special_tokens:
            raise InputError(f"--length {length}: the tokenizer's own marks alone are as long")
        return length - self.special_tokens

    def batches(self, passages: Sequence[Passage], size: int) -> list[Batch]:
        """Batches of so many passages; the last may have fewer."""
        return [self.batch(passages[i : i + size]) for i in range(0, len(passages), size)]

    def batch(self, passages: Sequence[Passage]) -> Batch:
        """Token numbers (passages, longest) padded behind, and which of them are tokens."""
        rows = [torch.tensor([*self.prefix, *passage, *self.suffix]) for passage in passages]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def spread(passages: Sequence[Passage], count: int) -> list[Passage]:
    """At most so many passages, evenly apart."""
    return [*passages[:: max(len(passages) // count, 1)][:count]]


class Reading:
    """Passages to train on and to judge by, the tokenizer's own marks at both ends included.

    Args:
        corpora: What is trained on, but for the last tenth of each.
        judge: A text of another source, of which nothing is trained on: bits per byte are its bytes.
        tokenizer: The model's.
        length: Tokens of a passage, at most; those to train on have log-uniform lengths from ``SHORTEST`` on.
        size: Passages of that length in a training batch; of shorter ones there are more, up to as many tokens.
        seed: Another one draws other batches.

    Attributes:
        groups: Held-out batches by what they are: ``"short"``, ``"other text, 512"`` and so on of the judge, and
            ``"trained text, 512"`` of the ends of what is trained on.
    """

    def __init__(
        self, corpora: Sequence[Corpus], judge: Corpus, tokenizer: Any, length: int, size: int, seed: int
    ) -> None:
        self.name = "; ".join(corpus.name for corpus in corpora)
        self.passages, self.length, self.size, self.seed = Passages(tokenizer), length, size, seed
        content = self.passages.content(length)
        self.shortest = min(max(SHORTEST, self.passages.special_tokens + 1), length)
        read = [self.passages.document(corpus) for corpus in corpora]
        cuts = [round((1 - HELD) * len(document)) for document in read]
        self.documents = [document[:cut] for document, cut in zip(read, cuts, strict=True)]
        self.ends = [*itertools.accumulate(cuts)]
        usual = min(length, LENGTHS[0])
        held = [self.passages.cut(document[cut:], usual) for document, cut in zip(read, cuts, strict=True)]
        if self.ends[-1] < content or not held[0][0]:
            raise InputError(
                f"{self.name} has {sum(map(len, read)):,} tokens, of which the last tenth is held out: too few for "
                f"passages of {length}; give a longer one, or a smaller --length"
            )
        document = self.passages.document(judge)
        self.tokens_per_byte = len(document) / judge.facts["bytes"]
        self.groups = self._judged(judge.name, document)
        self.groups[f"trained text, {usual}"] = self.passages.batches(spread([*itertools.chain(*held)], PASSAGES), size)

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

    def _judged(self, name: str, document: Passage) -> dict[str, list[Batch]]:
        """Groups of a text that is not trained on: short passages, and one group for every length."""
        lengths = [length for length in LENGTHS if length <= self.length] or [self.length]
        if len(document) < 2 * lengths[-1]:
            raise InputError(
                f"--judge {name} has {len(document):,} tokens: too few for two passages of {lengths[-1]}; give a "
                "longer one, or a smaller --length"
            )
        short = spread(self.passages.cut(document, min(SHORT, self.length)), PASSAGES)
        parts = [each[: max(len(each) // (1 + i % 4), 1)] for i, each in enumerate(short)]
        groups = {"short": self.passages.batches(parts, SHORT_ROWS)}
        for length in lengths:
            count = max(min(PASSAGES, TOKENS // length), LEAST)
            passages = spread(self.passages.cut(document, length), count)
            groups[f"other text, {length}"] = self.passages.batches(passages, self.size)
        return groups
