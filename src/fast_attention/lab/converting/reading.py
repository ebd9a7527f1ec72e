"""Cuts a text or proteins into passages: batches to train on by number, and passages that are held out."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import torch
from torch import Tensor

from fast_attention.lab.corpus import Corpus
from fast_attention.lab.inputs import InputError

HELD = 0.1  # fraction of the tokens that are never trained on: the last ones
PASSAGES = 24  # at most, of each of the two kinds that are held out
STRIDE = 1_000_003  # between the batches of two seeds; torch takes 32 bits
Batch = dict[str, Tensor]


class Reading:
    """Passages of up to ``length`` tokens, the tokenizer's own marks at both ends included.

    Args:
        corpus: What is read.
        tokenizer: The model's.
        length: Tokens of a passage; shorter documents (proteins) are padded.
        size: Passages of a batch.
        seed: Another one draws other batches.
    """

    def __init__(self, corpus: Corpus, tokenizer: Any, length: int, size: int, seed: int) -> None:
        self.corpus, self.size, self.seed = corpus, size, seed
        self.before, self.behind = _special(tokenizer)
        self.content = length - len(self.before) - len(self.behind)
        if self.content < 1:
            raise InputError(f"--length {length}: the tokenizer's own marks alone are as long")
        self.padding = int(tokenizer.pad_token_id or 0)
        plain: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
        documents = [corpus.numbers(tokenizer, text, "a document", **plain) for _, text in corpus.documents]
        sizes = [len(text.encode()) for _, text in corpus.documents]
        self.tokens_per_byte = sum(map(len, documents)) / sum(sizes)
        self.documents, held = _apart(documents)
        self.ends = list(itertools.accumulate(map(len, self.documents)))
        passages = [passage for document in held for passage in self._cut(document)]
        step = max(len(passages) // (2 * PASSAGES), 1)
        passages = passages[::step][: 2 * PASSAGES]
        if not self.ends or self.ends[-1] < self.content or len(passages) < 2:
            known = sum(map(len, documents))
            raise InputError(
                f"{corpus.name} has {known:,} tokens, of which the last tenth is held out: too few for passages of "
                f"{length}; give a longer one, or a smaller --length"
            )
        self.held_out, self.choosing = self._batches(passages[::2]), self._batches(passages[1::2])

    def batch(self, number: int) -> Batch:
        """Batch number i of the training passages: they begin anywhere, as ``seed`` and i say."""
        generator = torch.Generator().manual_seed(self.seed * STRIDE + number)
        return self._batch([self._drawn(generator) for _ in range(self.size)])

    def _drawn(self, generator: torch.Generator) -> list[int]:
        at = int(torch.randint(self.ends[-1], (), generator=generator))
        which = bisect.bisect_right(self.ends, at)
        document = self.documents[which]
        start = min(at - (self.ends[which] - len(document)), max(len(document) - self.content, 0))
        return document[start : start + self.content]

    def _cut(self, document: list[int]) -> list[list[int]]:
        """The passages of a document, one after the other; a rest at the end only where nothing else is."""
        passages = [document[i : i + self.content] for i in range(0, len(document) - self.content + 1, self.content)]
        return passages or [document]

    def _batches(self, passages: list[list[int]]) -> list[Batch]:
        return [self._batch(passages[i : i + self.size]) for i in range(0, len(passages), self.size)]

    def _batch(self, passages: list[list[int]]) -> Batch:
        rows = [torch.tensor([*self.before, *passage, *self.behind]) for passage in passages]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def _special(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    marked = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(marked)) if marked[i : i + len(bare)] == bare), 0)
    return marked[:at], marked[at + len(bare) :]


def _apart(documents: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Split documents: those to train on, and the last ones, or the end of a single one, that are held out."""
    if len(documents) == 1:
        cut = round((1 - HELD) * len(documents[0]))
        return [documents[0][:cut]], [documents[0][cut:]]
    cut = max(round((1 - HELD) * len(documents)), 1)
    return documents[:cut], documents[cut:]
