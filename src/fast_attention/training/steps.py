"""The parts of a training step: a model's settings for a task, optimiser, learning rate, loss, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import catalogue
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.nn.positions import PositionTable
from fast_attention.tasks.task import IGNORED, Batch, Task
from fast_attention.training.processes import Group
from fast_attention.training.settings import TrainingSettings

BETAS = (0.9, 0.98)


class Score(NamedTuple):
    """A model's score on the fixed validation set."""

    value: float  # in the task's metric
    loss: float  # nats per target


def config_for(task: Task, **settings: Any) -> ModelConfig:
    """Settings of a model for a task: its vocabulary, length, causality and head.

    Raises:
        ValueError: A setting of the model denies what the task needs.
    """
    defaults: dict[str, Any] = {"vocab_size": task.vocab_size, "max_len": task.length, "causal": task.causal}
    defaults["reads"] = task.reads
    if task.classes:
        defaults |= {"head": "classes", "classes": task.classes}
    config = ModelConfig(**{**defaults, **settings})
    check(task, config)
    return config


def check(task: Task, config: ModelConfig) -> None:
    """Raise a ``ValueError`` unless the model can learn the task."""
    if config.vocab_size < task.vocab_size:
        raise ValueError(f"{task!r} has {task.vocab_size} kinds of tokens and the model vocab_size={config.vocab_size}")
    if task.causal and not config.causal:
        raise ValueError(f"{task!r} asks for what comes next; a model with causal=False would see it")
    bounded = [name for name in config.mechanisms if catalogue.parse(name).traits.bounded]
    if config.max_len < task.length and (bounded or config.positions == "learned"):
        why = bounded[0] if bounded else "learned positions"
        raise ValueError(
            f"{task!r} has sequences of up to {task.length} tokens and the model, with {why}, reads max_len="
            f"{config.max_len}: make max_len larger or the task's sequences shorter"
        )
    if (config.head == "classes") != bool(task.classes) or config.classes < task.classes:
        raise ValueError(f"{task!r} has {task.classes} classes and the model head={config.head!r}, {config.classes}")


def optimiser_for(model: nn.Module, settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, but not on norms, biases and learned positions."""
    tables = {id(p) for m in model.modules() if isinstance(m, PositionTable) for p in m.parameters()}
    decayed = [p for p in model.parameters() if p.ndim > 1 and id(p) not in tables]
    decayed_ids = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in decayed_ids]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = decayed[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=BETAS, fused=fused)


def rate(settings: TrainingSettings, step: int, seconds: float) -> float:
    """The learning rate of a step: a linear warmup, then a cosine to zero."""
    done = min(max(settings.done(step, seconds), (step + 1) / (settings.steps + 1) if settings.steps else 0.0), 1.0)
    if done < settings.warmup:
        return settings.lr * done / settings.warmup
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (done - settings.warmup) / (1 - settings.warmup)))


def forward(model: nn.Module, batch: Batch, settings: TrainingSettings) -> tuple[Tensor, Tensor]:
    """Logits (targets, classes) in float32 and targets (targets,), including positions without a target."""
    device = batch.tokens.device.type
    with torch.autocast(device, torch.bfloat16, enabled=settings.precision == "bfloat16"):
        logits = model(batch.tokens, batch.key_mask)
    return logits.float().flatten(0, -2), batch.targets.flatten()


def loss_of(model: nn.Module, batch: Batch, settings: TrainingSettings) -> Tensor:
    """The sum of the losses of all targets, in nats."""
    return F.cross_entropy(*forward(model, batch, settings), ignore_index=IGNORED, reduction="sum")


def num_targets(batch: Batch) -> int:
    """The number of targets."""
    return int((batch.targets != IGNORED).sum())


def tokens_in(batch: Batch) -> int:
    """The number of tokens without padding."""
    return batch.tokens.numel() if batch.key_mask is None else int(batch.key_mask.sum())


@torch.no_grad()
def evaluate(
    model: Model, task: Task, settings: TrainingSettings, group: Group, poll: Callable[[], None] = lambda: None
) -> Score:
    """The score on the task's first validation batches, always the same ones.

    Args:
        model: The model; it is in training mode afterwards.
        task: The task, which gives batches and metric.
        settings: Size and number of the batches, precision.
        group: The processes that share the batches.
        poll: Called before each batch; what it raises ends the evaluation.
    """
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right answers, targets
    for *_, logits, targets in validation(model, task, settings, group, poll):
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        right = (logits.argmax(-1) == targets).sum()
        sums += torch.stack([loss, right.float(), (targets != IGNORED).sum().float()]).cpu()
    loss, right, count = group.total(sums)
    loss, right = loss / max(count, 1), right / max(count, 1)
    return Score({"accuracy": right, "nats": loss, "bits per byte": loss / math.log(2)}[task.metric], loss)


@torch.no_grad()
def validation(
    model: nn.Module, task: Task, settings: TrainingSettings, group: Group, poll: Callable[[], None] = lambda: None
) -> Iterator[tuple[slice, Batch, Tensor, Tensor]]:
    """The task's first validation batches, always the same ones: this process's positions and shard, and ``forward``'s.

    The model is in evaluation mode until the last, and in training mode afterwards; ``poll`` is called before each.
    """
    model.eval()
    try:
        for index in range(settings.evaluation_batches):
            poll()
            whole = task.batch("valid", index, settings.batch_size)
            batch = group.shard(whole)
            yield group.tokens(whole.tokens.shape[1]), batch, *forward(model, batch, settings)
    finally:
        model.train()


def better(task: Task, value: float, best: float | None) -> bool:
    """Whether a value of the task's metric beats another."""
    return best is None or (value > best if task.metric == "accuracy" else value < best)
