"""Causal language modelling of bytes, of any text file or folder, by default Python's standard library."""

from __future__ import annotations

import gzip
import lzma
import math
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

EXCLUDED = {"test", "tests", "site-packages", "dist-packages"}  # folders left out of Python's library
STRIDE = 7919  # a prime: validation passages lie far apart, whatever the number of them
BASELINE_BYTES = 1 << 20  # bytes of the validation side behind the printed baselines
COUNT_CHUNK = 1 << 24  # bytes counted at once


@dataclass(frozen=True, repr=False)
class ByteLM(Task):
    """Predict the next byte.

    Args:
        path: A file, plain or gzipped, or a folder of such, joined in order of their names; ``"python"`` for the
            standard library's sources, which are always there. They differ between versions of Python (``describe``).
        pattern: Which files of a folder; empty for all (of Python's library: ``*.py``). Hidden ones are left out.
        context: Bytes in a sequence.
        share: The fraction of the files (of a single file: of its end) held out for validation.
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
        """The number of different bytes."""
        return 256

    @property
    def length(self) -> int:
        """Bytes in a sequence."""
        return self.context

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Random passages for training; for validation evenly spread ones, the same in every run."""
        text = sides(self)[0 if split == "train" else 1]
        last_start = len(text) - self.context
        if split == "train":
            starts = torch.randint(last_start, (size,), generator=random_for(self, split, index))
        else:
            step = STRIDE * self.context
            while math.gcd(step, last_start) > 1:  # or some passages come again before others come at all
                step += 1
            starts = ((torch.arange(size) + index * size) * step) % last_start
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
    """A file's bytes, unpacked where it is gzip.

    Raises:
        ValueError: It cannot be read, its gzip data are damaged, or it is longer than ``reading.LIMIT``.
    """
    try:
        return reading.unpacked(path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the gzip data are damaged or cut off ({error})") from error
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
    contents = _folder(task, root) if root.is_dir() else _file(task, root)
    for name, content in zip(("training", "validation"), contents, strict=True):
        if len(content) <= task.context + 1:
            raise ValueError(f"{task.path}: {len(content)} bytes for {name}; context={task.context} needs more")
    first, second = (torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents)
    return first, second


def _file(task: ByteLM, path: Path) -> tuple[bytes, bytes]:
    content = read(path)
    cut = len(content) - round(task.share * len(content))
    return content[:cut], content[cut:]


def _folder(task: ByteLM, root: Path) -> tuple[bytes, bytes]:
    bundled = task.path == "python"
    pattern = task.pattern or ("*.py" if bundled else "*")
    files = []
    for path in sorted(root.rglob(pattern)):
        names = path.relative_to(root).parts
        hidden = any(name.startswith(".") for name in names)
        if path.is_file() and not hidden and not (bundled and EXCLUDED & {*names}):
            files.append(path)
    if len(files) < 2:
        raise ValueError(f"{task.path} holds {len(files)} files that fit {pattern!r}; a folder needs 2 or more")
    shuffled = torch.randperm(len(files), generator=random_for("split", task.seed)).tolist()
    validation = {*shuffled[: max(1, round(task.share * len(files)))]}
    texts = _texts(task.path, files)
    first, second = (b"\n".join(x for i, x in enumerate(texts) if (i in validation) == side) for side in (False, True))
    return first, second


def _texts(name: str, files: list[Path]) -> list[bytes]:
    """The contents of a folder's files, which together must keep the limit for one file."""
    texts, remaining = [], reading.LIMIT.get()
    for path in files:
        texts.append(read(path))
        remaining -= len(texts[-1])
        if remaining < 0:
            raise reading.TooLong(reading.too_long(name))
    return texts


@lru_cache(maxsize=2)
def _baselines(task: ByteLM) -> tuple[tuple[str, float], ...]:
    train, valid = sides(task)
    valid = valid[:BASELINE_BYTES]
    names = ("bytes", "pairs of bytes", "triples of bytes")
    bits: list[tuple[str, float]] = list(zip(names, ngram_bits(train, valid, len(names)), strict=True))
    content = valid.numpy().tobytes()
    bits.append(("gzip -9", 8 * len(zlib.compress(content, 9)) / len(content)))
    bits.append(("xz", 8 * len(lzma.compress(content)) / len(content)))
    return tuple(bits)


def ngram_bits(train: UInt8[Tensor, "train"], valid: UInt8[Tensor, "valid"], orders: int) -> list[float]:
    """Bits per byte of ``valid`` by counts of 1, 2, ... ``orders`` bytes of ``train``.

    Orders are interpolated as by Witten and Bell (1991, IEEE Trans. Inf. Theory 37:1085): a context seen n times with k
    different followers gives them the fraction n / (n + k) and the rest to the shorter context.
    """
    probability = torch.full((len(valid),), 1 / 256, dtype=torch.double)
    context_counts = torch.tensor([len(train)])
    bits = []
    for order in range(1, orders + 1):
        table = _table(train, order)
        followers = (table.view(-1, 256) > 0).sum(-1)
        grams = _grams(valid, order)
        contexts = grams >> 8
        totals = context_counts[contexts] + followers[contexts]
        probability = probability[-len(grams) :]
        interpolated = (table[grams] + followers[contexts] * probability) / totals
        probability = torch.where(totals > 0, interpolated, probability)
        bits.append(-probability.log2().mean().item())
        context_counts = table
    return bits


def _grams(text: UInt8[Tensor, "text"], order: int) -> Int[Tensor, "grams"]:
    """Every n-gram of ``order`` bytes as one number, the last byte lowest."""
    count = len(text) - order + 1
    codes = torch.zeros(count, dtype=torch.long)
    for i in range(order):
        codes = (codes << 8) | text[i : i + count]
    return codes


def _table(text: UInt8[Tensor, "text"], order: int) -> Int[Tensor, "grams"]:
    """The counts of all n-grams of ``order`` bytes in the text."""
    total = torch.zeros(256**order, dtype=torch.long)
    for start in range(0, len(text) - order + 1, COUNT_CHUNK):
        total += torch.bincount(_grams(text[start : start + COUNT_CHUNK + order - 1], order), minlength=256**order)
    return total
