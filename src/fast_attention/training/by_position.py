"""Loss by position in the context: whether a language model gains from tokens that are far back."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from fast_attention.tasks.task import IGNORED, Task
from fast_attention.training import steps
from fast_attention.training.processes import Group
from fast_attention.training.settings import TrainingSettings

FIRST, MOST = 32, 8  # positions in the first bucket, and the most buckets
UNITS = {"nats": 1.0, "bits per byte": math.log(2)}  # of metrics that are a loss


def buckets(length: int) -> list[tuple[int, int]]:
    """First and last position of each bucket: 0 to 31, 32 to 63, 64 to 127, each next twice as long, the rest."""
    starts = [start for start in (0, *(FIRST << i for i in range(MOST - 1))) if start < length]
    return list(zip(starts, [*(start - 1 for start in starts[1:]), length - 1], strict=True))


def applies(task: Task) -> bool:
    """Whether the task is causal language modelling: a loss at every position, of what comes next."""
    return task.causal and task.metric in UNITS


@torch.no_grad()
def loss_by_position(
    model: nn.Module, task: Task, settings: TrainingSettings, group: Group
) -> list[tuple[int, int, float]]:
    """The loss on the validation set that ``steps.evaluate`` takes, for each bucket of positions.

    Args:
        model: The model; it is in training mode afterwards.
        task: One that ``applies``.
        settings: Size and number of the batches, precision.
        group: The processes that share the batches.

    Returns:
        First position, last position and mean loss in the task's metric; buckets without a target are left out.
        Position 0 is the first token of the sequence, with which its second is predicted.
    """
    sums = torch.zeros(2, task.length, dtype=torch.float64)  # loss and targets
    for at, batch, logits, targets in steps.validation(model, task, settings, group):
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        added = torch.stack([losses, (targets != IGNORED).float()]).view(2, *batch.targets.shape).cpu()
        sums[:, at] += added.sum(1, dtype=torch.float64)
    loss, count = torch.tensor(group.total(sums.flatten()), dtype=torch.float64).view(2, -1)
    each = [(first, last, slice(first, last + 1)) for first, last in buckets(task.length)]
    unit = UNITS[task.metric]
    return [(a, b, float(loss[part].sum() / count[part].sum()) / unit) for a, b, part in each if count[part].any()]
