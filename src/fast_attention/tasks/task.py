"""What a task is: a frozen value whose batch number i is a pure function, so that any run can be resumed."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fast_attention.value import Value

Split = Literal["train", "valid"]
IGNORED = -100  # the target of a position without a loss, as torch.nn.functional.cross_entropy has it


class Batch(NamedTuple):
    """Sequences and what is to be predicted of them."""

    tokens: Tensor  # whole numbers (B, L)
    targets: Tensor  # (B, L), ``IGNORED`` where nothing is asked; (B,) for classes
    key_mask: Tensor | None = None  # (B, L), True = a token; None: no padding

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        tokens, targets, mask = self
        return Batch(tokens.to(device), targets.to(device), None if mask is None else mask.to(device))


class Task(Value, ABC):
    """A source of batches. Subclasses are frozen dataclasses; a ``seed`` field makes other data of the same kind."""

    name: ClassVar[str]
    causal: ClassVar[bool] = False
    reads: ClassVar[Literal["", "bytes", "residues"]] = ""  # what the tokens are; "": numbers of its own
    metric: ClassVar[str] = "accuracy"  # or "nats", "bits per byte"
    takes: ClassVar[str] = ""  # the setting of a file of the user's, which may follow the name: classify FILE

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Kinds of tokens."""

    @property
    @abstractmethod
    def length(self) -> int:
        """The longest sequence."""

    @property
    def classes(self) -> int:
        """Kinds of sequences; 0 where single tokens are predicted."""
        return 0

    @abstractmethod
    def batch(self, split: Split, index: int, size: int) -> Batch:
        """Batch number ``index`` of ``size`` sequences: always the same for the same numbers."""

    @abstractmethod
    def baselines(self) -> dict[str, float]:
        """What can be had without learning anything, in the task's metric, by name."""

    def describe(self) -> dict[str, str]:
        """What the data are, for the log: amounts and digests by side. Empty where the repr says it all."""
        return {}

    def remarks(self) -> list[str]:
        """What somebody who trains on these data had better know, a sentence each; mostly nothing."""
        return []


class PackageMissing(ImportError, ValueError):
    """A package that brings the task's data is not installed. The message names it."""


def random_for(*parts: object) -> torch.Generator:
    """A generator that follows from what it is for: independent streams for different tasks, splits and batches."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def digest(*parts: Tensor) -> str:
    """SHA-256 of the numbers in order, for logs: the same data have the same."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
