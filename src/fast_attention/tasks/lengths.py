"""Batches of sequences of about equal length, so that little of a batch is padding."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fast_attention.tasks.task import Split, Task, random_for

POOL = 64  # batches whose sequences are sorted by length together: the larger, the less padding and the less chance


@lru_cache(maxsize=4)
def order(task: Task, split: Split, size: int, epoch: int, lengths: tuple[int, ...]) -> Int[Tensor, "batches size"]:
    """Which sequences make which batch of an epoch: each sequence once, but for a rest smaller than a batch.

    Args:
        task: Whose seed decides, with ``split`` and ``epoch``.
        split: The side.
        size: Sequences in a batch; with fewer of them at hand, some come twice.
        epoch: How often all have been seen.
        lengths: Of the side's sequences.
    """
    source = random_for(task, split, "epoch", epoch)
    count = max(1, len(lengths) // size)
    rounds = -(-size // len(lengths))
    drawn = torch.cat([torch.randperm(len(lengths), generator=source) for _ in range(rounds)])[: count * size]
    pools = torch.arange(len(drawn)) // (POOL * size)
    keys = pools * (max(lengths) + 1) + torch.tensor(lengths)[drawn]
    batches = drawn[keys.argsort(stable=True)].view(count, size)
    return batches[torch.randperm(count, generator=source)]


def chosen(task: Task, split: Split, index: int, size: int, lengths: tuple[int, ...]) -> list[int]:
    """The sequences of batch number ``index``."""
    epoch, place = divmod(index, max(1, len(lengths) // size))
    return order(task, split, size, epoch, lengths)[place].tolist()


def padded(rows: list[Tensor], filler: int) -> tuple[Int[Tensor, "rows longest"], Bool[Tensor, "rows longest"]]:
    """The rows side by side, filled up to the longest, and where they have something."""
    tokens = torch.nn.utils.rnn.pad_sequence([row.long() for row in rows], batch_first=True, padding_value=filler)
    sizes = torch.tensor([len(row) for row in rows])
    return tokens, torch.arange(tokens.shape[1]) < sizes[:, None]
