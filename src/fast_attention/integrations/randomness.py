"""torch's random generators, which putting a mechanism into a model leaves as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def kept(model: nn.Module | None = None) -> Iterator[None]:
    """Draws inside come from torch's generators as they stand, which afterwards stand there again.

    So a program continues with the numbers that it had without the swap, and what is drawn depends on ``manual_seed``.

    Args:
        model: On whose accelerators numbers are drawn too.
    """
    places = {p.device for p in model.parameters()} if model is not None else set()
    beside = sorted({d.index for d in places if d.index is not None and d.type == "cuda"})
    with torch.random.fork_rng(devices=beside):
        yield
