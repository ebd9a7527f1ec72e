"""Causal language modelling of bytes: any text file or folder, Python's own library by default."""

from __future__ import annotations

import lzma
import sysconfig
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from fast_attention.data import reading
from fast_attention.tasks.task import Batch, Split, Task, digest, random_for
from fast_attention.value import at_least

APART = {"test", "tests", "site-packages", "dist-packages"}  # folders of Python's library that are no part of it
STRIDE = 7919  # a prime: validation passages lie far apart, whatever the number of them
JUDGED = 1 << 20  # bytes of the validation side behind the printed baselines
COUNTED = 1 << 24  # bytes counted at once


@dataclass(frozen=True, repr=False)
class ByteLM(Task):
    """Predict the next byte.

    Args:
        path: A file, or a folder whose files are joined in order of their names; ``"python"`` for the standard
            library's sources, which are always there. They differ between versions of Python: see ``describe``.
        pattern: Which files of a folder; empty for all (of Python's library: ``*.py``). Hidden ones are left out.
        context: Bytes in a sequence.
        share: Of the files (of a single file: of its end) held out for validation.
        seed: For the split and the order.
    """

    path: str = "python"
    pattern: str = ""
    context: int = 256
    share: float = 0.05
    seed: int = 0

    name = "byte-lm"
    reads = "bytes"
    causal = True
    metric = "bits per byte"
    takes = "path"

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
        """Random passages in training; in validation the same ones, evenly spread, in every run."""
        text = sides(self)[0 if split == "train" else 1]
        room = len(text) - self.context
        if split == "train":
            starts = torch.randint(room, (size,), generator=random_for(self, split, index))
        else:
            starts = ((torch.arange(size) + index * size) * STRIDE * self.context) % room
        rows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return Batch(rows[:, :-1], rows[:, 1:])

    def baselines(self) -> dict[str, float]:
        """Bits per byte of the validation side by counts of one, two and three bytes, and by general compressors."""
        return dict(_baselines(self))

    def describe(self) -> dict[str, str]:
        """Bytes and digest of each side."""
        return {
            name: f"{len(side):,} bytes, SHA-256 {digest(side)}"
            for name, side in zip(("training", "validation"), sides(self), strict=True)
        }


def read(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        ValueError: It cannot be read, or is longer than ``reading.LIMIT``.
    """
    try:
        return reading.raw(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error


@lru_cache(maxsize=2)
def sides(task: ByteLM) -> tuple[UInt8[Tensor, "train"], UInt8[Tensor, "valid"]]:
    """Training and validation bytes.

    Raises:
        ValueError: There is no such file, none that fits, or too little in it.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if task.path == "python" else Path(task.path)
    if not root.exists():
        raise ValueError(f"{task.path}: there is no such file or folder")
    parts = _folder(task, root) if root.is_dir() else _file(task, root)
    for name, part in zip(("training", "validation"), parts, strict=True):
        if len(part) <= task.context + 1:
            raise ValueError(f"{task.path}: {len(part)} bytes for {name}; more than context={task.context} are needed")
    first, second = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return first, second


def _file(task: ByteLM, path: Path) -> tuple[bytes, bytes]:
    whole = read(path)
    cut = len(whole) - round(task.share * len(whole))
    return whole[:cut], whole[cut:]


def _folder(task: ByteLM, root: Path) -> tuple[bytes, bytes]:
    own = task.path == "python"
    pattern = task.pattern or ("*.py" if own else "*")
    files = []
    for path in sorted(root.rglob(pattern)):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith(".") for part in parts) and not (own and APART & {*parts}):
            files.append(path)
    if len(files) < 2:
        raise ValueError(f"{task.path} holds {len(files)} files that fit {pattern!r}; a folder needs 2 or more")
    shuffled = torch.randperm(len(files), generator=random_for("split", task.seed)).tolist()
    held = {*shuffled[: max(1, round(task.share * len(files)))]}
    texts = _texts(task.path, files)
    first, second = (b"\n".join(x for i, x in enumerate(texts) if (i in held) == side) for side in (False, True))
    return first, second


def _texts(name: str, files: list[Path]) -> list[bytes]:
    """The files of a folder, all together within the limit for one."""
    texts, room = [], reading.LIMIT.get()
    for path in files:
        texts.append(read(path))
        room -= len(texts[-1])
        if room < 0:
            raise reading.TooLong(reading.too_long(name))
    return texts


@lru_cache(maxsize=2)
def _baselines(task: ByteLM) -> tuple[tuple[str, float], ...]:
    train, valid = sides(task)
    valid = valid[:JUDGED]
    names = ("bytes", "pairs of bytes", "triples of bytes")
    found: list[tuple[str, float]] = list(zip(names, counted(train, valid, len(names)), strict=True))
    plain = valid.numpy().tobytes()
    found.append(("gzip -9", 8 * len(zlib.compress(plain, 9)) / len(plain)))
    found.append(("xz", 8 * len(lzma.compress(plain)) / len(plain)))
    return tuple(found)


def counted(train: UInt8[Tensor, "train"], valid: UInt8[Tensor, "valid"], orders: int) -> list[float]:
    """Bits per byte of ``valid`` by counts of 1, 2, ... ``orders`` bytes of ``train``.

    Each order leans on the one before as Witten and Bell have it (1991, IEEE Trans. Inf. Theory 37:1085): a past seen n
    times with k different followers gives them the fraction n / (n + k) and the rest to the shorter past.
    """
    chance = torch.full((len(valid),), 1 / 256, dtype=torch.double)
    seen = torch.tensor([len(train)])
    found = []
    for order in range(1, orders + 1):
        table = _table(train, order)
        kinds = (table.view(-1, 256) > 0).sum(-1)
        grams = _grams(valid, order)
        pasts = grams >> 8
        total = seen[pasts] + kinds[pasts]
        chance = chance[-len(grams) :]
        leaning = (table[grams] + kinds[pasts] * chance) / total
        chance = torch.where(total > 0, leaning, chance)
        found.append(-chance.log2().mean().item())
        seen = table
    return found


def _grams(text: UInt8[Tensor, "text"], order: int) -> Int[Tensor, "grams"]:
    """Every ``order`` bytes in a row as one number, the last byte lowest."""
    count = len(text) - order + 1
    codes = torch.zeros(count, dtype=torch.long)
    for i in range(order):
        codes = (codes << 8) | text[i : i + count]
    return codes


def _table(text: UInt8[Tensor, "text"], order: int) -> Int[Tensor, "grams"]:
    """How often every ``order`` bytes in a row occur in the text."""
    total = torch.zeros(256**order, dtype=torch.long)
    for start in range(0, len(text) - order + 1, COUNTED):
        total += torch.bincount(_grams(text[start : start + COUNTED + order - 1], order), minlength=256**order)
    return total
