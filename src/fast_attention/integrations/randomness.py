"""Leaves torch's random generators as they were, whatever is drawn while a mechanism is put into a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def restored_generators(model: nn.Module | None = None) -> Iterator[None]:
    """Restore torch's generators at the end of the block, which may draw from them.

    So a program continues with the numbers that it had without the swap, and what is drawn depends on ``manual_seed``.

    Args:
        model: The generators of its accelerators are restored too.
    """
    devices = {p.device for p in model.parameters()} if model is not None else set()
    cuda = sorted({d.index for d in devices if d.index is not None and d.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        yield
