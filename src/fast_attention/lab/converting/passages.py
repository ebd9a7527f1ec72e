"""Turns documents into passages of token numbers, and passages into padded batches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fast_attention.lab.corpus import Corpus
from fast_attention.lab.inputs import InputError

SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
Batch = dict[str, Tensor]
Passage = list[int]


class Passages:
    """Passages with the tokenizer's own marks at both ends.

    Args:
        tokenizer: The model's.

    Attributes:
        special_tokens: How many the tokenizer adds to every passage.
        padding: The token that fills the shorter rows of a batch.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.before, self.behind = _special(tokenizer)
        self.special_tokens = len(self.before) + len(self.behind)
        self.padding = int(tokenizer.pad_token_id or 0)

    def documents(self, corpus: Corpus) -> list[Passage]:
        """The tokens of every document; those of a text are joined, proteins keep to themselves."""
        texts = [text for _, text in corpus.documents]
        texts = ["\n\n".join(texts)] if corpus.kind == "text" else texts
        return [
            corpus.numbers(self.tokenizer, each, "a document", add_special_tokens=False, verbose=False)
            for each in texts
        ]

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

    def sentences(self, corpus: Corpus, length: int) -> list[Passage]:
        """Passages of whole sentences, by turns as many as fit into a quarter, a half and all of ``length`` tokens."""
        content = self.content(length)
        limits = itertools.cycle([max(content // parts, 1) for parts in (4, 2, 1)])
        passages: list[Passage] = [[]]
        limit = next(limits)
        for text in SENTENCE.split("\n\n".join(text for _, text in corpus.documents)):
            ids = self.tokenizer(f"{text} ", add_special_tokens=False, verbose=False)["input_ids"]
            if passages[-1] and len(passages[-1]) + len(ids) > limit:
                passages.append([])
                limit = next(limits)
            passages[-1] += ids[:limit]
        return [passage for passage in passages if passage]

    def batches(self, passages: Sequence[Passage], size: int) -> list[Batch]:
        """Batches of so many passages; the last may have fewer."""
        return [self.batch(passages[i : i + size]) for i in range(0, len(passages), size)]

    def batch(self, passages: Sequence[Passage]) -> Batch:
        """Token numbers (passages, longest) padded behind, and which of them are tokens."""
        rows = [torch.tensor([*self.before, *passage, *self.behind]) for passage in passages]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def spread(passages: Sequence[Passage], count: int) -> list[Passage]:
    """At most so many passages, evenly apart."""
    return [*passages[:: max(len(passages) // count, 1)][:count]]


def _special(tokenizer: Any) -> tuple[Passage, Passage]:
    """What the tokenizer puts before and behind a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    marked = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(marked)) if marked[i : i + len(bare)] == bare), 0)
    return marked[:at], marked[at + len(bare) :]
