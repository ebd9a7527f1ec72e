"""The report of a swap, layer by layer, its messages, and what the layers cost at a length."""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import clock
from fast_attention.counting import counted
from fast_attention.engine import trace
from fast_attention.integrations.untrained import NOTHING
from fast_attention.mechanism import Mechanism
from fast_attention.nn.bound import Bound

UNNAMED = "no pattern names it"  # why a layer stays for which nothing was asked
MANY = 6  # layers that an error lists
ROUNDS = 5  # of timing both in turns
PATIENCE = 2.0  # seconds after which no further round begins


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model.

    Attributes:
        name: Its module's name, as in ``model.named_modules()``.
        kind: Its module's class.
        heads: Heads of queries.
        head_dim: The width of a head.
        is_causal: Whether a query sees earlier tokens only.
    """

    name: str
    kind: str
    heads: int
    head_dim: int
    is_causal: bool


@dataclass(frozen=True)
class Layer(AttentionLayer):
    """An attention layer that was swapped for a mechanism, or kept.

    Attributes:
        mechanism: What it runs after the swap, as an expression.
        why: For a layer that was kept the reason; for a swapped one remarks.
        replaced: Whether it was swapped.
        parameters: How many learned parameters came with the mechanism.
        untrained: What its outputs are worth before training; empty for a layer that was kept.
    """

    mechanism: str
    why: str = ""
    replaced: bool = True
    parameters: int = 0
    untrained: str = ""


@dataclass(frozen=True)
class Report:
    """The result of ``swap``: ``model`` with the mechanisms in it, and every layer. Print it."""

    model: nn.Module = field(repr=False)
    layers: tuple[Layer, ...]
    refused: tuple[str, ...] = ()  # parts of the model of which nothing could be replaced, and why

    @property
    def replaced(self) -> tuple[Layer, ...]:
        """The layers that run another mechanism now."""
        return tuple(layer for layer in self.layers if layer.replaced)

    @property
    def kept(self) -> tuple[Layer, ...]:
        """The layers that stayed exact, each with its reason."""
        return tuple(layer for layer in self.layers if not layer.replaced)

    @property
    def parameters(self) -> int:
        """Learned numbers that were added."""
        return sum(layer.parameters for layer in self.layers)

    def expected(self, length: int, *, batch: int = 1) -> Expected:
        """The costs of every replaced layer's attention at a length, before and after.

        Operations and memory are counted in one forward pass on Gaussian tensors, as many keys as queries; times are
        medians of up to five passes on the layer's device, of the implementation that it chooses there.
        ``fast-attention advise`` compares many mechanisms.

        Args:
            length: Tokens of a sequence.
            batch: Sequences.

        Raises:
            ValueError: ``length`` or ``batch`` is below 1, or a mechanism's weights are for fewer tokens.
        """
        if length < 1 or batch < 1:
            raise ValueError(f"expected(length={length}, batch={batch}): both must be at least 1")
        costs: dict[Any, tuple[Cost, Cost]] = {}
        layers = {}
        for layer in self.replaced:
            module = self.model.get_submodule(layer.name)
            bound = next(part for part in module.modules() if isinstance(part, Bound))
            kind = (layer.heads, layer.head_dim, layer.is_causal, layer.mechanism)
            if kind not in costs:
                like = next(module.parameters())
                costs[kind] = pair(bound, length, batch, like, is_causal=layer.is_causal)
            layers[layer.name] = costs[kind]
        return Expected(length, batch, layers)

    def __str__(self) -> str:
        """A paragraph for equal layers: their class, the mechanism, what it does untrained, remarks."""
        lines = []
        for group in grouped(self.layers):
            first = group[0]
            causal = ", causal" if first.is_causal else ""
            lines.append(f"{span([layer.name for layer in group])}: {first.heads} heads of {first.head_dim}{causal}")
            outcome = f"-> {first.mechanism}" if first.replaced else f"kept, {first.mechanism}"
            untrained = first.untrained and f"untrained: {first.untrained}"
            for text in filter(None, (f"{first.kind} {outcome}", untrained, first.why)):
                lines += wrapped(text)
        total = f"{len(self.replaced)} of {len(self.layers)} attention layers replaced"
        total += f", {self.parameters:,} parameters added"
        if useless := sum(layer.untrained.startswith(NOTHING) for layer in self.layers):
            total += f"; {useless} of them worth {NOTHING}"
        return "\n".join([*lines, total, *self.refused])


def grouped(layers: Sequence[Any]) -> list[list[Any]]:
    """Layers by what is equal in all but their names, in the order of the first of each."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for layer in layers:
        groups.setdefault(tuple(value for name, value in vars(layer).items() if name != "name"), []).append(layer)
    return [*groups.values()]


def chosen(name: str, wanted: Mechanism[Any, Any] | dict[str, Any]) -> Any:
    """The mechanism for a layer, by the first pattern that fits its name; None where none does."""
    if not isinstance(wanted, dict):
        return wanted
    return next((mechanism for pattern, mechanism in wanted.items() if fnmatchcase(name, pattern)), None)


def nothing_swapped(model: nn.Module, layers: Sequence[Layer]) -> str:
    """The message that no layer of a model was swapped, with the reasons."""
    reasons = dict.fromkeys(layer.why for layer in layers)
    names = f"; {listed(layers)}" if UNNAMED in reasons else ""
    return f"no attention layer of {type(model).__name__} was swapped: {'; '.join(reasons)}{names}"


def listed(layers: Sequence[Layer]) -> str:
    """The names of the layers, for messages about patterns."""
    more = f" and {len(layers) - MANY} more" if len(layers) > MANY else ""
    return f"there are {', '.join(layer.name for layer in layers[:MANY])}{more}"


def no_queries(mechanism: object) -> str:
    """The reason why a mixer cannot replace an attention."""
    return f"{mechanism!r} mixes whole tokens and takes no queries"


def dropout_note(p: float) -> str:
    """The remark that attention weights are not dropped in training though the model asks for it."""
    return f"in training its attention weights are not dropped (the model drops {p:g})"


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


# Costs ----------------------------------------------------------------------------------------------------------------


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
