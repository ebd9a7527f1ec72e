"""ListOps in the Long Range Arena's version (Tay et al. 2020, arXiv 2011.04006): the value of a nested expression."""

from __future__ import annotations

import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fast_attention.tasks.task import Batch, Split, Task, random_for
from fast_attention.value import at_least

OPERATORS = ("MIN", "MAX", "MED", "SM")
OPENING, CLOSING, PAD = 10, 14, 15  # tokens: digits 0-9, four operators from 10 on, the closing bracket, padding
DEPTH, ARGUMENTS, NESTING = 10, (2, 10), 0.25
SAMPLE = 2_000  # expressions behind the printed baselines


def value(operator: int, numbers: list[int]) -> int:
    """The value of an operator's arguments; the median of an even number of them is the floored mean of the middle."""
    match OPERATORS[operator]:
        case "MIN":
            return min(numbers)
        case "MAX":
            return max(numbers)
        case "SM":
            return sum(numbers) % 10
    ranked, half = sorted(numbers), len(numbers) // 2
    return ranked[half] if len(numbers) % 2 else (ranked[half - 1] + ranked[half]) // 2


@dataclass(frozen=True, repr=False)
class ListOps(Task):
    """Predict the value of expressions such as ``[MAX 2 9 [MIN 4 7] 0]``, one of ten classes.

    A node is an operator with probability 1/4 above depth 10, else a digit; an operator has 2 to 10 arguments. A
    checksum of the expression decides between training and validation, so that none is in both.

    Args:
        shortest: Expressions have more tokens than this ...
        longest: ... and fewer than this (LRA: 500 and 2000).
        seed: For the data.
    """

    shortest: int = 64
    longest: int = 256
    seed: int = 0

    name = "listops"

    def __post_init__(self) -> None:
        at_least(self, "shortest", self.shortest, 1)
        at_least(self, "longest", self.longest, self.shortest + 10)

    @property
    def vocab_size(self) -> int:
        """Digits, operators, the closing bracket and padding."""
        return 16

    @property
    def length(self) -> int:
        """The longest expression."""
        return self.longest

    @property
    def classes(self) -> int:
        """The digits."""
        return 10

    def draw(self, split: Split, source: random.Random) -> tuple[list[int], int]:
        """Tokens and value of a random expression of the split, of a length within the limits."""
        while True:
            tokens: list[int] = []
            result = _node(source, 1, tokens, self.longest)
            if result is not None and self.shortest < len(tokens) < self.longest and side(tokens) == split:
                return tokens, result

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Padded expressions and their values."""
        source = random.Random(random_for(self, split, index).initial_seed())
        drawn = [self.draw(split, source) for _ in range(size)]
        longest = max(len(tokens) for tokens, _ in drawn)
        tokens = torch.tensor([row + [PAD] * (longest - len(row)) for row, _ in drawn])
        return Batch(tokens, torch.tensor([result for _, result in drawn]), tokens != PAD)

    def baselines(self) -> dict[str, float]:
        """The commonest value; the best guess from the root operator; the best from it and its direct digits."""
        return dict(_baselines(self))


def side(tokens: list[int]) -> Split:
    """The split of an expression: one in four is for validation."""
    return "train" if zlib.crc32(bytes(tokens)) % 4 else "valid"


def _node(source: random.Random, depth: int, tokens: list[int], longest: int) -> int | None:
    """Append a random expression; its value, or None once it is too long."""
    if len(tokens) >= longest:
        return None
    if depth >= DEPTH or source.random() >= NESTING:
        tokens.append(int(10 * source.random()))  # three times as fast as randrange
        return tokens[-1]
    operator, numbers = int(len(OPERATORS) * source.random()), []
    tokens.append(OPENING + operator)
    for _ in range(source.randint(*ARGUMENTS)):
        number = _node(source, depth + 1, tokens, longest)
        if number is None:
            return None
        numbers.append(number)
    tokens.append(CLOSING)
    return value(operator, numbers)


def _root_and_digits(tokens: list[int]) -> tuple[int, int]:
    """The root operator and its value over the digits that are its direct arguments (or -1 without any)."""
    depth, digits = 0, []
    for token in tokens:
        if OPENING <= token < CLOSING:
            depth += 1
        elif token == CLOSING:
            depth -= 1
        elif depth == 1:
            digits.append(token)
    return tokens[0], value(tokens[0] - OPENING, digits) if digits else -1


@lru_cache(maxsize=8)
def _baselines(task: ListOps) -> tuple[tuple[str, float], ...]:
    """Each rule's best guesses come from training expressions and are judged on others."""
    source = random.Random(random_for(task, "baselines").initial_seed())
    train, judged = ([task.draw("train", source) for _ in range(SAMPLE)] for _ in range(2))
    rules: dict[str, Callable[[list[int]], Any]] = {
        "commonest value": lambda tokens: 0,
        "root operator": lambda tokens: tokens[0],
        "root operator with its digits": _root_and_digits,
    }
    accuracies = []
    for name, rule in rules.items():
        counts: defaultdict[Any, Counter[int]] = defaultdict(Counter)
        for tokens, answer in train:
            counts[rule(tokens)][answer] += 1
        guesses = {key: count.most_common(1)[0][0] for key, count in counts.items()}
        accuracies.append((name, sum(guesses.get(rule(tokens)) == answer for tokens, answer in judged) / len(judged)))
    return tuple(accuracies)
