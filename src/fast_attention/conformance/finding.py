"""Findings of laws: kept, broken or not claimed, and the measured size of the breach."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

Status = Literal["kept", "broken", "not claimed"]


@dataclass(frozen=True)
class Finding:
    """The result of a law for a subject; ``size`` is relative to the output's rms unless ``detail`` says otherwise."""

    status: Status
    size: float = 0.0
    limit: float = 0.0
    detail: str = ""
    law: str = ""


Breaches = Iterable[tuple[float, str]]


class NotClaimed(Exception):
    """Raised by a law that is about something which the subject does not promise."""


def claims(promised: Any, otherwise: str) -> None:
    """Raise ``NotClaimed`` unless the subject promises what a law is about."""
    if not promised:
        raise NotClaimed(otherwise)


@dataclass(frozen=True)
class Law:
    """A law: ``measured(subject, device)`` gives every breach and its place.

    The largest of the breaches must not exceed ``limit``, or else rounding in the subject's dtype; nor may one be NaN.
    """

    name: str
    measured: Callable[[Any, str], Breaches]
    limit: float | None = None

    def __call__(self, subject: Any, device: str = "cpu") -> Finding:
        """Judge the subject; an attention that raises where the law calls it breaks the law."""
        try:
            breaches = ((x if x == x else math.inf, at) for x, at in self.measured(subject, device))
            size, at = max(breaches, key=itemgetter(0), default=(0.0, ""))
        except NotClaimed as error:
            return Finding("not claimed", detail=str(error), law=self.name)
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines()
            detail = f"raised {type(error).__name__}: {lines[0] if lines else ''}"[:200]
            return Finding("broken", float("inf"), 0.0, detail, self.name)
        limit = rounding(subject.dtype) if self.limit is None else self.limit
        return Finding("kept" if size <= limit else "broken", size, limit, at if size else "", self.name)


def law(name: str, limit: float | None = None) -> Callable[[Callable[[Any, str], Breaches]], Law]:
    """Make a law of a function."""
    return lambda measured: Law(name, measured, limit)


def moved(after: Tensor, before: Tensor) -> float:
    """The largest change, relative to the rms of ``before``; infinite where something is not finite."""
    if after.numel() == 0:
        return 0.0
    change = (after.detach() - before.detach()).abs().max().item()
    rms = before.detach().square().mean().sqrt().item()
    return change / max(rms, 1e-30) if change == change and change != float("inf") else float("inf")


def all_moved(after: Iterable[Tensor], before: Iterable[Tensor]) -> float:
    """The largest change among several tensors."""
    return max((moved(a, b) for a, b in zip(after, before, strict=True)), default=0.0)


def rounding(dtype: torch.dtype) -> float:
    """How far an output may move by rounding alone: some thousand units in the last place."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 3e-2)
