"""What a swapped layer's attention costs at a length, beside exact attention's: counted, and timed here."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import clock
from fast_attention.counting import count_operations, peak_bytes
from fast_attention.nn.bound import Bound


@dataclass(frozen=True)
class Cost:
    """Of a forward pass of one layer's attention, projections left out."""

    operations: int  # as ``counting.count_operations`` counts them
    bytes: int  # the most held at once beyond queries, keys and values, the outputs included
    seconds: float  # on the layer's device, with the threads of this process


@dataclass(frozen=True)
class Expected:
    """What the replaced layers cost, each as it was and as it is. Printed, it is a table."""

    length: int
    batch: int
    layers: dict[str, tuple[Cost, Cost]]  # name -> exact attention's, the mechanism's

    def __str__(self) -> str:
        """Layers of equal cost stand together, with their number."""
        same: dict[tuple[Cost, Cost], list[str]] = {}
        for name, costs in self.layers.items():
            same.setdefault(costs, []).append(name)
        lines = [
            f"{self.batch} x {self.length:,} tokens, forward, attention alone; time measured here, the rest counted:"
        ]
        for (before, after), names in same.items():
            count = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            lines.append(
                f"  {names[0]}{count}: operations {before.operations / 1e6:,.4g} M -> {after.operations / 1e6:,.4g} M, "
                f"memory {before.bytes / 2**20:,.4g} MiB -> {after.bytes / 2**20:,.4g} MiB, "
                f"time {before.seconds * 1e3:,.3g} ms -> {after.seconds * 1e3:,.3g} ms"
            )
        return "\n".join(lines)


ROUNDS = 5  # of both, in turns
PATIENCE = 2.0  # seconds after which no further round begins


@torch.no_grad()
def pair(bound: Bound, length: int, batch: int, like: Tensor, *, is_causal: bool) -> tuple[Cost, Cost]:
    """Exact attention's cost and the mechanism's, on Gaussian tensors of the layer's sizes; random generators stay.

    Raises:
        ValueError: The mechanism's weights are cut for fewer tokens.
    """
    size = (batch, bound.shape.heads, length, bound.shape.head_dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, generator=generator).to(like.device, like.dtype) for _ in range(3))

    runs = (
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal),
        lambda: bound(q, k, v, is_causal=is_causal),
    )
    with torch.random.fork_rng(devices=[]):
        counted = [(count_operations(run), peak_bytes(run, like.device)) for run in runs]
        took: tuple[list[float], list[float]] = ([], [])
        while len(took[0]) < ROUNDS and sum(map(sum, took)) < PATIENCE:
            for run, found in zip(runs, took, strict=True):
                found.append(clock.seconds(run, like.device))
    exact, ours = (Cost(*found, statistics.median(times)) for found, times in zip(counted, took, strict=True))
    return exact, ours
