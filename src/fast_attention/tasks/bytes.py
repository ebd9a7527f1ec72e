"""Causal language modelling of bytes: any text file or folder, Python's own library by default."""

from __future__ import annotations

import lzma
import math
import sysconfig
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fast_attention.ops.value import at_least
from fast_attention.tasks.task import Batch, Split, Task, random_for


@dataclass(frozen=True, repr=False)
class ByteLM(Task):
    """Predict the next byte.

    Args:
        path: A file, or a folder whose files are joined in order of their names; ``"python"`` for the standard
            library's sources, which are always there.
        pattern: Which files of a folder.
        context: Bytes in a sequence.
        share: Of the files (of a single file: of its end) held out for validation.
        seed: For the split and the order.
    """

    path: str = "python"
    pattern: str = "*.py"
    context: int = 256
    share: float = 0.05
    seed: int = 0

    name = "byte-lm"
    causal = True
    metric = "bits per byte"

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 2)
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"ByteLM(share={self.share!r}): share must lie between 0 and 1")

    @property
    def vocab_size(self) -> int:
        """The bytes."""
        return 256

    @property
    def length(self) -> int:
        """Bytes in a sequence."""
        return self.context

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Random stretches in training; in validation the same ones, evenly spread, in every run."""
        text = sides(self)[0 if split == "train" else 1]
        room = len(text) - self.context
        if split == "train":
            starts = torch.randint(room, (size,), generator=random_for(self, split, index))
        else:
            starts = ((torch.arange(size) + index * size) * 7919 * self.context) % room
        rows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return Batch(rows[:, :-1], rows[:, 1:])

    def baselines(self) -> dict[str, float]:
        """Bits per byte of the validation side by counts of one, two and three bytes, and by general compressors."""
        return dict(_baselines(self))


@lru_cache(maxsize=2)
def sides(task: ByteLM) -> tuple[Tensor, Tensor]:
    """Training and validation bytes."""
    root = Path(sysconfig.get_paths()["stdlib"]) if task.path == "python" else Path(task.path)
    if root.is_file():
        whole = root.read_bytes()
        cut = len(whole) - round(task.share * len(whole))
        parts = whole[:cut], whole[cut:]
    else:
        apart = {"test", "tests", "site-packages"}
        files = sorted(p for p in root.rglob(task.pattern) if p.is_file() and not apart & {*p.relative_to(root).parts})
        if not files:
            raise ValueError(f"{task.path} holds no file that fits {task.pattern!r}")
        order = torch.randperm(len(files), generator=random_for("split", task.seed)).tolist()
        held = {*order[: max(1, round(task.share * len(files)))]}
        parts = tuple(
            b"\n".join(f.read_bytes() for i, f in enumerate(files) if (i in held) == side) for side in (False, True)
        )
    for name, part in zip(("training", "validation"), parts, strict=True):
        if len(part) <= task.context + 1:
            raise ValueError(f"{task.path}: {len(part)} bytes for {name}; more than context={task.context} are needed")
    first, second = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return first, second


@lru_cache(maxsize=2)
def _baselines(task: ByteLM) -> tuple[tuple[str, float], ...]:
    train, valid = (bytes(side.numpy()) for side in sides(task))
    valid = valid[: 1 << 20]
    found: list[tuple[str, float]] = []
    for order, name in ((1, "bytes"), (2, "pairs of bytes"), (3, "triples of bytes")):
        found.append((name, _counted(train, valid, order)))
    found.append(("gzip -9", 8 * len(zlib.compress(valid, 9)) / len(valid)))
    found.append(("xz", 8 * len(lzma.compress(valid)) / len(valid)))
    return tuple(found)


def _counted(train: bytes, valid: bytes, order: int) -> float:
    """Bits per byte by counts of ``order`` bytes, each order leaning on the one before (Witten and Bell)."""
    counts = [Counter(train[i : i + n] for i in range(len(train) - n + 1)) for n in range(1, order + 1)]
    followers: list[Counter[bytes]] = [Counter(gram[:-1] for gram in table) for table in counts]
    bits = 0.0
    for i in range(order - 1, len(valid)):
        chance = 1 / 256
        for n in range(1, order + 1):
            past, gram = valid[i - n + 1 : i], valid[i - n + 1 : i + 1]
            seen = len(train) if n == 1 else counts[n - 2][past]
            kinds = followers[n - 1][past]
            if seen + kinds:
                chance = (counts[n - 1][gram] + kinds * chance) / (seen + kinds)
        bits -= math.log2(chance)
    return bits / (len(valid) - order + 1)
