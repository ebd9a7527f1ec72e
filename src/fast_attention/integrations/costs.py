"""Counts and times the attention of swapped layers at a length, beside exact attention."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import clock
from fast_attention.counting import counted
from fast_attention.engine import trace
from fast_attention.nn.bound import Bound


@dataclass(frozen=True)
class Cost:
    """The cost of one layer's attention in a forward pass, without projections."""

    operations: int  # as ``counting.count_operations`` counts them
    bytes: int  # the most held at once beyond queries, keys and values, the outputs included
    seconds: float  # on the layer's device, with the threads of this process
    path: str = ""  # which of the mechanism's implementations ran; empty where it has one


@dataclass(frozen=True)
class Expected:
    """The costs of the replaced layers, before and after. Print it."""

    length: int
    batch: int
    layers: dict[str, tuple[Cost, Cost]]  # name -> exact attention's, the mechanism's

    def __str__(self) -> str:
        """A paragraph for each group of layers with equal costs."""
        groups: dict[tuple[Cost, Cost], list[str]] = {}
        for name, costs in self.layers.items():
            groups.setdefault(costs, []).append(name)
        sizes = f"{self.batch} x {self.length:,} tokens"
        lines = [f"{sizes}, forward, attention alone; time measured here, the rest counted:"]
        for (before, after), names in groups.items():
            lines.append(f"{span(names)}{', each' * (len(names) > 1)}")
            rows = (
                ("operations", 1e-6, "M", before.operations, after.operations),
                ("memory", 2**-20, "MiB", before.bytes, after.bytes),
                ("time", 1e3, "ms", before.seconds, after.seconds),
            )
            counted = [f"{what} {_rounded(a * f)} {unit} -> {_rounded(b * f)} {unit}" for what, f, unit, a, b in rows]
            lines += wrapped(", ".join(counted))
            lines += wrapped(f"runs {after.path}") if after.path else []
        return "\n".join(lines)


def wrapped(text: str) -> list[str]:
    """The text in indented lines of at most 100 columns."""
    return textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="      ")


def _rounded(number: float) -> str:
    """The number with three digits, without an exponent below a million."""
    return f"{float(f'{number:.3g}'):,g}"


def span(names: list[str]) -> str:
    """One name for layers in a row: ``encoder.layer.0-4.attention (5 layers)`` where only a number counts up."""
    first, last = (re.split(r"(\d+)", name) for name in (names[0], names[-1]))
    if len(names) == 1:
        return names[0]
    differing = [i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b]
    text = f"{names[0]} ... {names[-1]}"
    if len(first) == len(last) and len(differing) == 1 and differing[0] % 2 == 1:
        low, high = first[differing[0]], last[differing[0]]
        if int(high) - int(low) + 1 == len(names):
            text = "".join([*first[: differing[0]], f"{low}-{high}", *first[differing[0] + 1 :]])
    return f"{text} ({len(names)} layers)"


def exact_and_bound(
    bound: Bound, length: int, batch: int, like: Tensor, *, is_causal: bool
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Exact attention and a mechanism, to be called on the same Gaussian tensors of its sizes."""
    size = (batch, bound.shape.heads, length, bound.shape.head_dim)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, generator=generator).to(like.device, like.dtype) for _ in range(3))
    return (
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal),
        lambda: bound(q, k, v, is_causal=is_causal),
    )


ROUNDS = 5  # of timing both in turns
PATIENCE = 2.0  # seconds after which no further round begins


@torch.no_grad()
def pair(bound: Bound, length: int, batch: int, like: Tensor, *, is_causal: bool) -> tuple[Cost, Cost]:
    """Exact attention's cost and the mechanism's, on Gaussian tensors of the layer's sizes.

    Raises:
        ValueError: The mechanism's weights are for fewer tokens.
    """
    runs = exact_and_bound(bound, length, batch, like, is_causal=is_causal)
    with torch.random.fork_rng(devices=[]):
        costs = [counted(run, like.device) for run in runs]
        with trace.recorded() as steps:
            seconds_of = clock.in_turns(dict(enumerate(runs)), like.device, ROUNDS, PATIENCE)
    path = ", ".join(dict.fromkeys(step.path for step in steps))
    pairs = zip(costs, seconds_of.values(), strict=True)
    exact, ours = (Cost(*counts, statistics.median(times)) for counts, times in pairs)
    return exact, replace(ours, path=path)
