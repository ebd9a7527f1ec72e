"""The base class of tasks: a frozen value whose batch number i is a pure function, so that any run can be resumed."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fast_attention.value import Value

Split = Literal["train", "valid"]
IGNORED = -100  # the target of a position without a loss, as torch.nn.functional.cross_entropy has it


class Batch(NamedTuple):
    """A batch of sequences and targets."""

    tokens: Tensor  # whole numbers (B, L)
    targets: Tensor  # (B, L), ``IGNORED`` where nothing is predicted; (B,) for classes
    key_mask: Tensor | None = None  # (B, L), True = a token; None: no padding

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        tokens, targets, mask = self
        return Batch(tokens.to(device), targets.to(device), None if mask is None else mask.to(device))


class Task(Value, ABC):
    """A source of batches. Subclasses are frozen dataclasses; a ``seed`` field makes other data of the same kind.

    Every subclass's ``batch`` raises a ``ValueError`` for a split, index or size that there is not.
    """

    name: ClassVar[str]
    causal: ClassVar[bool] = False
    reads: ClassVar[Literal["", "bytes", "residues"]] = ""  # what the tokens are; "": numbers of its own
    metric: ClassVar[str] = "accuracy"  # or "nats", "bits per byte"
    takes: ClassVar[str] = ""  # the setting of a file of the user's, which may follow the name: classify FILE

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (batch := vars(cls).get("batch")) is None:
            return

        @functools.wraps(batch)
        def checked(self: Any, split: Split, index: int, size: int) -> Batch:
            if split not in get_args(Split):
                raise ValueError(f"split={split!r}: choose one of {', '.join(get_args(Split))}")
            for name, value in (("index", index), ("size", size)):
                if not isinstance(value, Integral) or value < 0:
                    raise ValueError(f"{name}={value!r} must be a whole number, at least 0")
            return batch(self, split, index, size)

        cls.batch = checked  # type: ignore[method-assign]

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of different tokens."""

    @property
    @abstractmethod
    def length(self) -> int:
        """The longest sequence."""

    @property
    def classes(self) -> int:
        """The number of classes of sequences; 0 where single tokens are predicted."""
        return 0

    @abstractmethod
    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Batch number ``index``, from 0, of ``size`` sequences: always the same for the same numbers."""

    @abstractmethod
    def baselines(self) -> dict[str, float]:
        """Scores of simple guesses, by name, in the task's metric: what a model must beat."""

    def describe(self) -> dict[str, str]:
        """A description of the data for the log: amounts and digests of each split. Empty where the repr suffices."""
        return {}

    def remarks(self) -> list[str]:
        """Warnings about the data, a sentence each."""
        return []


class PackageMissing(ImportError, ValueError):
    """A package that brings the task's data is not installed. The message names it."""


def random_for(*parts: object) -> torch.Generator:
    """A generator seeded by its purpose: independent streams for different tasks, splits and batches."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def digest(*parts: Tensor) -> str:
    """The SHA-256 of the numbers in order, for logs."""
    sha = hashlib.sha256()
    for tensor in parts:
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
