"""Synthetic recall tasks: copying, duplication, selective copying, associative recall."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from fast_attention.tasks.task import IGNORED, Batch, Split, Task, random_for
from fast_attention.value import at_least


@dataclass(frozen=True, repr=False)
class Copy(Task):
    """``BOS w SEP w``: predict the second w, symbol by symbol, from left to right.

    Args:
        symbols: Kinds of symbols.
        words: Length of w.
        seed: For the data.
    """

    symbols: int = 10
    words: int = 31
    seed: int = 0

    name = "copy"
    causal = True

    def __post_init__(self) -> None:
        at_least(self, "symbols", self.symbols, 2)
        at_least(self, "words", self.words, 1)

    @property
    def vocab_size(self) -> int:
        """Symbols and separators."""
        return self.symbols + len({*self._separators})

    @property
    def length(self) -> int:
        """Both halves with their separators, without the last symbol, after which nothing is predicted."""
        return 2 * self.words + 1

    @property
    def _separators(self) -> tuple[int, int]:
        """The tokens before each half; symbols are the other numbers."""
        return self.symbols, self.symbols + 1

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Sequences and, for each position of the second half, the symbol that comes next."""
        first = 1 if 0 in self._separators else 0
        w = torch.randint(first, first + self.symbols, (size, self.words), generator=random_for(self, split, index))
        bos, separator = (torch.full((size, 1), separator) for separator in self._separators)
        tokens = torch.cat([bos, w, separator, w], -1)
        targets = tokens[:, 1:].clone()
        targets[:, : self.words + 1] = IGNORED
        return Batch(tokens[:, :-1], targets)

    def baselines(self) -> dict[str, float]:
        """Guessing."""
        return {"chance": 1 / self.symbols}


@dataclass(frozen=True, repr=False)
class Duplicate(Copy):
    """Reformer's synthetic task ``0 w 0 w`` (arXiv 2001.04451, section 5): copying with one separator, 0.

    Args:
        symbols: Kinds of symbols, from 1 on.
        words: Length of w.
        seed: For the data.
    """

    symbols: int = 127

    name = "duplicate"

    @property
    def _separators(self) -> tuple[int, int]:
        return 0, 0


@dataclass(frozen=True, repr=False)
class SelectiveCopy(Task):
    """Data scattered among noise, to be repeated in order after cue tokens (Gu and Dao 2023, arXiv 2312.00752, E.1).

    Args:
        symbols: Kinds of data tokens.
        data: Data tokens in a sequence.
        context: Positions among which they are scattered.
        seed: For the data.
    """

    symbols: int = 14
    data: int = 8
    context: int = 120
    seed: int = 0

    name = "selective-copy"
    causal = True

    def __post_init__(self) -> None:
        at_least(self, "symbols", self.symbols, 2)
        at_least(self, "data", self.data, 1)
        at_least(self, "context", self.context, self.data)

    @property
    def vocab_size(self) -> int:
        """Data tokens, noise and cue."""
        return self.symbols + 2

    @property
    def length(self) -> int:
        """The context and a cue for each data token."""
        return self.context + self.data

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Sequences; the target at cue number i is the i-th data token."""
        generator = random_for(self, split, index)
        values = torch.randint(self.symbols, (size, self.data), generator=generator)
        positions = torch.rand(size, self.context, generator=generator).argsort(-1)[:, : self.data].sort(-1).values
        context = torch.full((size, self.context), self.symbols).scatter(-1, positions, values)
        tokens = torch.cat([context, torch.full((size, self.data), self.symbols + 1)], -1)
        targets = torch.cat([torch.full((size, self.context), IGNORED), values], -1)
        return Batch(tokens, targets)

    def baselines(self) -> dict[str, float]:
        """Guessing."""
        return {"chance": 1 / self.symbols}


@dataclass(frozen=True, repr=False)
class MQAR(Task):
    """Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): ``k1 v1 k2 v2 ...``, then keys.

    Their values are to be predicted. Every key is repeated once, at an even position, most of them early: the g-th of
    those positions (g = 1, 2, ...) has probability proportional to ``g^(power - 1)`` among the positions that are left.

    Args:
        vocab: Kinds of tokens; keys below the half, values above, 0 as filler.
        pairs: Keys and values in a sequence.
        context: Tokens in a sequence, at least ``4 * pairs``.
        power: Of the distribution of gaps.
        seed: For the data.
    """

    vocab: int = 256
    pairs: int = 4
    context: int = 64
    power: float = 0.01
    seed: int = 0

    name = "mqar"
    causal = True

    def __post_init__(self) -> None:
        at_least(self, "pairs", self.pairs, 1)
        at_least(self, "vocab", self.vocab, 2 * self.pairs + 2)
        at_least(self, "context", self.context, 4 * self.pairs)
        at_least(self, "power", self.power, 0.0)

    @property
    def vocab_size(self) -> int:
        """Keys, values and the filler."""
        return self.vocab

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.context

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Sequences; the target at each repeated key is its value."""
        generator, half = random_for(self, split, index), self.vocab // 2
        keys = 1 + torch.rand(size, half - 1, generator=generator).topk(self.pairs).indices
        values = half + torch.rand(size, self.vocab - half, generator=generator).topk(self.pairs).indices
        gaps = self._gaps(size, generator)
        tokens = torch.zeros(size, self.context, dtype=torch.long)
        tokens[:, 0 : 2 * self.pairs : 2], tokens[:, 1 : 2 * self.pairs : 2] = keys, values
        positions = 2 * self.pairs + 2 * gaps
        targets = torch.full((size, self.context), IGNORED)
        return Batch(tokens.scatter(-1, positions, keys), targets.scatter(-1, positions, values))

    def _gaps(self, size: int, generator: torch.Generator) -> Int[Tensor, "size pairs"]:
        """The position after the pairs, by its number, at which each key is repeated."""
        slots = (self.context - 2 * self.pairs) // 2
        weight = torch.arange(1, slots + 1, dtype=torch.double) ** (self.power - 1)
        return torch.multinomial(weight.expand(size, -1), self.pairs, generator=generator)

    def baselines(self) -> dict[str, float]:
        """Guessing one of the sequence's values; guessing by position alone, over 100,000 sequences.

        The first pairs draw the first gaps, so that a position tells something about the pair that is repeated there.
        """
        gaps = self._gaps(100_000, random_for("baselines", self))
        counts = torch.stack([torch.bincount(gaps[:, i], minlength=int(gaps.max()) + 1) for i in range(self.pairs)])
        usual = counts.max(0).values.sum().item() / gaps.numel()
        return {"one of the sequence's values": 1 / self.pairs, "the pair most often asked at that position": usual}


@dataclass(frozen=True, repr=False)
class Lookup(MQAR):
    """MQAR for bidirectional models: nothing after a repeated key tells its value.

    A mechanism that does not look up by content, such as a Fourier transform, stays near the baseline.

    Args:
        vocab: Kinds of tokens; keys below the half, values above, 0 as filler.
        pairs: Keys and values in a sequence.
        context: Tokens in a sequence, at least ``4 * pairs``.
        power: Of the distribution of gaps.
        seed: For the data.
    """

    name = "lookup"
    causal = False
