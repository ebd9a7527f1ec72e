"""Opens a model with what it reads, and records its calls before and after a mechanism is put in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.integrations import swap
from fast_attention.lab import capture, corpus, inputs, library_source, loading
from fast_attention.lab.calls import Call, reading
from fast_attention.lab.inputs import InputError


class ModelAndText:
    """A model and what it reads.

    Args:
        name: What ``loading.find`` knows.
        text, fasta: Files to read; the shipped samples without either.
        ids: Token numbers instead.
        length: The most tokens to read.

    Raises:
        InputError: The model or the file cannot be read, or the token numbers do not fit.
    """

    model: nn.Module

    def __init__(self, name: str, *, text: str | None, fasta: str | None, ids: list[int] | None, length: int) -> None:
        if ids is not None and (text or fasta):
            raise InputError("give --ids or a file to read, not both")
        self.name, source = name, loading.find(name)
        self.ours = source.ours
        if source.ours:
            opened = library_source.LibrarySource(source.folder, name, text, fasta)
            self.model = opened.model
            self.tokens, self.read = opened.tokens(min(length, opened.context or length))
            kinds = opened.model.config.vocab_size
        else:
            model = loading.load(name)
            self.model = model.get_encoder() if model.config.is_encoder_decoder else model
            kinds = model.config.get_text_config().vocab_size
            if ids is None:
                self.tokens, self.read = _read(name, model.config, corpus.read(text, fasta), length)
        if ids is not None:
            wrong = [number for number in ids if not 0 <= number < kinds]
            if wrong or not ids:
                raise InputError(f"--ids {','.join(map(str, ids))}: give token numbers from 0 to {kinds - 1}")
            self.tokens, self.read = torch.tensor([ids]), f"{len(ids)} given token numbers"

    def calls(self, mechanism: Any) -> tuple[list[Call], list[Call]]:
        """Every layer's call with its own attention, and with the mechanism; the model keeps the last that ran.

        Args:
            mechanism: What is put in; None for a model that was swapped before.

        Raises:
            InputError: It cannot be put in, or no layer attends with queries and keys.
        """
        after: list[Call] = []
        if mechanism is None:
            after = [] if self.ours else reading(self.model, self.tokens)
            if not after:
                raise InputError(f"{self.name} runs its own attention: give --mechanism to put another in its place")
        with inputs.refusing():
            if not self.ours:
                swap(self.model, "Softmax")
            before = reading(self.model, self.tokens)
            if mechanism is not None:
                library_source.replace(self.model, mechanism)
                after = reading(self.model, self.tokens)
        names = {call.layer for call in before} & {call.layer for call in after}
        if not names:
            raise InputError(f"{self.name}: no layer attends with queries and keys")
        return [call for call in before if call.layer in names], [call for call in after if call.layer in names]


def _read(name: str, config: Any, words: corpus.Corpus, length: int) -> tuple[Tensor, str]:
    try:
        tokenizer = loading.tokenizer(name)
    except InputError as error:
        raise InputError(f"{error}, or give --ids") from error
    return words.tokens(tokenizer, min(length, capture.context(config, tokenizer) or length))
