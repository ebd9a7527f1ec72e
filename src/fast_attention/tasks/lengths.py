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
    """The sequences of every batch of an epoch: each sequence once, except for a rest smaller than a batch.

    Args:
        task: Its seed decides, with ``split`` and ``epoch``.
        split: Training or validation.
        size: Sequences in a batch.
        epoch: The number of the epoch.
        lengths: The lengths of the split's sequences, at least ``size``.
    """
    generator = random_for(task, split, "epoch", epoch)
    count = len(lengths) // size
    indices = torch.randperm(len(lengths), generator=generator)[: count * size]
    pool_of = torch.arange(len(indices)) // (POOL * size)
    keys = pool_of * (max(lengths) + 1) + torch.tensor(lengths)[indices]
    batches = indices[keys.argsort(stable=True)].view(count, size)
    return batches[torch.randperm(count, generator=generator)]


def chosen(task: Task, split: Split, index: int, size: int, lengths: tuple[int, ...]) -> list[int]:
    """The indices of the sequences of batch number ``index``.

    Where there are fewer than two batches of them, one order follows the other without a rest: a mean over any number
    of batches weighs all sequences alike, to one.
    """
    few = len(lengths)
    if few >= 2 * size:
        epoch, batch = divmod(index, few // size)
        return order(task, split, size, epoch, lengths)[batch].tolist()
    first, last = index * size, (index + 1) * size
    epochs = range(first // few, -(-last // few))
    orders = [torch.randperm(few, generator=random_for(task, split, "epoch", epoch)) for epoch in epochs]
    start = first - epochs[0] * few
    return torch.cat(orders)[start : start + size].tolist()


def padded(rows: list[Tensor], filler: int) -> tuple[Int[Tensor, "rows longest"], Bool[Tensor, "rows longest"]]:
    """The rows padded to the longest, and the key mask of what is no padding."""
    tokens = torch.nn.utils.rnn.pad_sequence([row.long() for row in rows], batch_first=True, padding_value=filler)
    sizes = torch.tensor([len(row) for row in rows])
    return tokens, torch.arange(tokens.shape[1]) < sizes[:, None]
