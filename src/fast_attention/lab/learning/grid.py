"""Measures recall of a trained model: needles at every depth of contexts of several lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fast_attention.lab.tables import Table, Value
from fast_attention.nn import saving
from fast_attention.tasks.needle import DIGITS, Needle
from fast_attention.tasks.task import IGNORED
from fast_attention.training import steps
from fast_attention.training.settings import TrainingSettings

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHORTEST = 128


def lengths(task: Needle) -> list[int]:
    """The task's length, its half, its quarter, down to the shortest useful one."""
    halves = [task.context]
    while halves[-1] // 2 >= SHORTEST:
        halves.append(halves[-1] // 2)
    return halves[::-1]


def recalled(folder: Path, task: Needle, settings: TrainingSettings) -> list[dict[str, Any]]:
    """Fraction of answers with all digits right, at each length and depth, by the model in ``folder``."""
    model = saving.load(folder, settings.device)
    cells = task.grid(lengths(task), DEPTHS)
    return [
        {"length": length, "depth": depth, "recalled": _fraction(model, cell, settings)}
        for (length, depth), cell in cells.items()
    ]


@torch.no_grad()
def _fraction(model: Any, task: Needle, settings: TrainingSettings) -> float:
    right = total = 0
    for index in range(settings.evaluation_batches):
        batch = task.batch("valid", index, settings.batch_size).to(settings.device)
        logits, targets = steps.forward(model, batch, settings)
        asked = targets != IGNORED
        hits = (logits.argmax(-1) == targets)[asked].view(-1, DIGITS).all(-1)
        right, total = right + int(hits.sum()), total + len(hits)
    return right / total


def table(cells: list[dict[str, Any]]) -> Table:
    """Depths from left to right, lengths from top to bottom."""
    rows = []
    for length in dict.fromkeys(cell["length"] for cell in cells):
        fractions = [cell["recalled"] for cell in cells if cell["length"] == length]
        rows.append([f"{length:,}", *(Value(f"{x:.0%}", "fast" if x > 0.5 else "slow") for x in fractions)])
    return Table(["tokens", *(f"depth {depth:.0%}" for depth in DEPTHS)], rows, title="answers recalled")
