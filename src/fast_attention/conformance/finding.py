"""Findings of laws: kept, broken or not claimed, and the measured size of the breach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Law:
    """A law with its name: a function from a subject and a device to a finding."""

    name: str
    evaluate: Callable[[Any, str], Finding]

    def __call__(self, subject: Any, device: str = "cpu") -> Finding:
        """Judge the subject; an attention that raises where the law calls it breaks the law."""
        try:
            finding = self.evaluate(subject, device)
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines()
            detail = f"raised {type(error).__name__}: {lines[0] if lines else ''}"[:200]
            finding = Finding("broken", float("inf"), 0.0, detail)
        return replace(finding, law=self.name)


def law(name: str) -> Callable[[Callable[[Any, str], Finding]], Law]:
    """Make a law of a function ``(subject, device) -> Finding``."""
    return lambda evaluate: Law(name, evaluate)


def judged(size: float, limit: float, detail: str = "") -> Finding:
    """Kept where ``size <= limit``; NaN breaks every law."""
    return Finding("kept" if size <= limit else "broken", size, limit, detail)


def unclaimed(detail: str) -> Finding:
    """The finding where the subject does not promise what the law is about."""
    return Finding("not claimed", detail=detail)


def moved(after: Tensor, before: Tensor) -> float:
    """The largest change, relative to the rms of ``before``; infinite where something is not finite."""
    if after.numel() == 0:
        return 0.0
    change = (after.detach() - before.detach()).abs().max().item()
    rms = before.detach().square().mean().sqrt().item()
    return change / max(rms, 1e-30) if change == change and change != float("inf") else float("inf")


def rounding(dtype: torch.dtype) -> float:
    """How far an output may move by rounding alone: some thousand units in the last place."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 3e-2)
