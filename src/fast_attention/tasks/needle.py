"""The needle-in-a-haystack task, byte by byte: recall a sentence that stands somewhere in a long text."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from string import ascii_lowercase

import torch
from jaxtyping import Int
from torch import Tensor

from fast_attention import data
from fast_attention.tasks.bytes import read
from fast_attention.tasks.task import IGNORED, Batch, Split, Task, digest, random_for
from fast_attention.value import at_least

LETTERS, DIGITS = 5, 4
VALIDATION = 0.1  # of the text's end, for validation


@dataclass(frozen=True, repr=False)
class Needle(Task):
    """``... the key of qfxzb is 4071. ...`` somewhere in real text; at the end ``the key of qfxzb is`` asks for 4071.

    Args:
        context: Bytes in a sequence.
        depth: Where the sentence stands: 0.0 at the start, 1.0 just before the question; None for anywhere.
        path: A text file for the hay; ``"sample"`` for the shipped prose.
        seed: For the data.
    """

    context: int = 256
    depth: float | None = None
    path: str = "sample"
    seed: int = 0

    name = "needle"
    takes = "path"
    causal = True

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 64)
        if self.depth is not None and not 0.0 <= self.depth <= 1.0:
            raise ValueError(f"Needle(depth={self.depth!r}): depth must lie between 0 and 1, or be None")

    @property
    def vocab_size(self) -> int:
        """The number of different bytes."""
        return 256

    @property
    def length(self) -> int:
        """Bytes in a sequence."""
        return self.context

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Texts, with the answer's four digits as targets, each predicted from the digits before it."""
        source = random.Random(random_for(self, split, index).initial_seed())
        text = sides(self)[0 if split == "train" else 1]
        tokens = torch.tensor([list(self.draw(text, source)) for _ in range(size)])
        targets = tokens[:, 1:].clone()
        targets[:, :-DIGITS] = IGNORED
        return Batch(tokens[:, :-1], targets)

    def draw(self, text: bytes, source: random.Random) -> bytes:
        """One text of ``context + 1`` bytes that ends in the answer."""
        key = "".join(source.choices(ascii_lowercase, k=LETTERS))
        answer = f"{source.randrange(10**DIGITS):0{DIGITS}}"
        needle, question = f" the key of {key} is {answer}. ".encode(), f" the key of {key} is {answer}".encode()
        hay_length = self.context + 1 - len(needle) - len(question)
        start = source.randrange(len(text) - hay_length)
        hay = text[start : start + hay_length]
        depth = source.random() if self.depth is None else self.depth
        cut = round(depth * hay_length)
        return hay[:cut] + needle + hay[cut:] + question

    def baselines(self) -> dict[str, float]:
        """Guessing a digit. All four are right by chance once in ten thousand texts."""
        return {"chance": 0.1}

    def describe(self) -> dict[str, str]:
        """Bytes and digest of the hay of each side."""
        return {
            name: f"{len(side):,} bytes, SHA-256 {digest(_as_tensor(side))}"
            for name, side in zip(("training", "validation"), sides(self), strict=True)
        }

    def grid(self, contexts: Iterable[int], depths: Iterable[float]) -> dict[tuple[int, float], Needle]:
        """The task at every length and depth, to measure where recall ends."""
        depth_list = list(depths)
        return {(n, depth): replace(self, context=n, depth=depth) for n in contexts for depth in depth_list}


def _as_tensor(text: bytes) -> Int[Tensor, "bytes"]:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@lru_cache(maxsize=64)
def sides(task: Needle) -> tuple[bytes, bytes]:
    """The hay of training and validation.

    Raises:
        ValueError: The file cannot be read or is too short.
    """
    text = data.text().encode() if task.path == "sample" else read(Path(task.path))
    cut = len(text) - round(VALIDATION * len(text))
    if len(text) - cut <= task.context:
        needed = f"{len(text)} bytes; context={task.context} needs {round((task.context + 2) / VALIDATION)}"
        raise ValueError(f"{task.path}: {needed}")
    return text[:cut], text[cut:]
