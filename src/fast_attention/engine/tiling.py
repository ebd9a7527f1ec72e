"""Says which tiles attention is computed in: which queries, which keys these see, and what a mask hides of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import logsigmoid

from fast_attention.engine.workspace import Workspace

Memory = Callable[..., Tensor]  # uninitialised memory of a shape


@runtime_checkable
class Keys(Protocol):
    """The keys of a tile in ``x`` (heads, length, E): how they are read, and where their gradients belong."""

    def read(self, x: Tensor, memory: Memory) -> Shaped[Tensor, "heads_or_number span E"]:
        """The keys (or the values) as a view of ``x`` or in ``memory``."""
        ...

    def add(self, gradient: Tensor, dx: Tensor, x: Tensor) -> None:
        """Add the gradient of what ``read`` gave; the engine does so for keys first and then for values."""
        ...


class Span(NamedTuple):
    """``number`` chunks of ``size`` tokens, ``step`` apart: one chunk of each head, or several of a single head."""

    first: int
    size: int
    number: int = 1
    step: int = 0

    def read(self, x: Tensor, memory: Memory | None = None) -> Shaped[Tensor, "heads_or_number size E"]:
        """A view of these tokens."""
        if self.number == 1:
            return x[:, self.first : self.first + self.size]
        end = self.first + (self.number - 1) * self.step + self.size
        return x[0, self.first : end].unfold(0, self.size, self.step).mT

    def add(self, gradient: Tensor, dx: Tensor, x: Tensor) -> None:
        """Chunks of keys of one tile do not overlap."""
        self.read(dx).add_(gradient)


class Blocks(NamedTuple):
    """Blocks of ``size`` keys by number: ``indices`` (heads * choices) counts the blocks of all heads of the group."""

    indices: Tensor
    size: int

    def read(self, x: Tensor, memory: Memory) -> Tensor:
        """The blocks, gathered."""
        rows = x.view(-1, self.size * x.shape[-1])
        out = memory(self.indices.shape[0], rows.shape[1])
        return torch.index_select(rows, 0, self.indices, out=out).view(x.shape[0], -1, x.shape[-1])

    def add(self, gradient: Tensor, dx: Tensor, x: Tensor) -> None:
        """A block may be named by several heads' choices, or by none."""
        rows = dx.view(-1, self.size * dx.shape[-1])
        rows.index_add_(0, self.indices, gradient.view(-1, rows.shape[1]))


@runtime_checkable
class Bias(Protocol):
    """What is added to the scores of a tile, by head: minus infinity where a key is not visible."""

    def write(self, q: Float[Tensor, "tiles rows width"], scores: Tensor, work: Workspace, *, scale: float) -> None:
        """Write it into ``scores`` (tiles, rows, span), to which products, ``scale`` times, are added."""
        ...

    def add(self, d_scores: Tensor, q: Tensor, dq: Tensor, work: Workspace, *, scale: float) -> None:
        """Add the gradients of what it was made of, given that of the scores; to ``dq`` that of the queries."""
        ...


class Tile(NamedTuple):
    """Queries and the keys that they see.

    ``bias`` is finite somewhere in every row; what may leave a row empty is ``masked``. One tensor (rows, span) for all
    heads is 0 or -inf.
    """

    queries: Span
    keys: Keys
    bias: Float[Tensor, "*#some span"] | Bias | None = None
    masked: Bool[Tensor, "*#some span"] | None = None

    @staticmethod
    def of(queries: Span, keys: Keys, visible: Bool[Tensor, "*#some span"], dtype: torch.dtype) -> Tile:
        """The tile in which a query sees the ``visible`` keys, or none."""
        if visible.any(-1).all():
            return Tile(queries, keys, bias_of(visible, dtype))
        return Tile(queries, keys, masked=~visible)


class Sinks(NamedTuple):
    """Of every head a score that takes weight from all keys and has no value: a term of the normaliser."""

    scores: Float[Tensor, "heads"]
    gradient: Float[Tensor, "heads"] | None = None  # to be added to

    @staticmethod
    def ready(scores: Float[Tensor, "some"] | None, like: Float[Tensor, "*batch length width"]) -> Sinks | None:
        """For every head of ``like``, whose last leading axes are those of ``scores``; None without."""
        if scores is None:
            return None
        every = scores.to(like.dtype).expand(*like.shape[:-2]).flatten()
        return Sinks(every, torch.zeros_like(every) if scores.requires_grad else None)

    def of(self, group: slice) -> Sinks:
        """Those of a group of heads."""
        return Sinks(self.scores[group], None if self.gradient is None else self.gradient[group])

    def weigh(self, weights: Float[Tensor, "tiles rows span"], top: Float[Tensor, "tiles rows 1"]) -> None:
        """Take the sink's share from softmax weights in place, given the largest score of every row.

        The largest weight is ``e^(top - log_sum)``, and keys keep ``sigmoid(log_sum - sink)`` of the weight.
        """
        log_sums = top.sub_(weights.amax(-1, keepdim=True).log_())
        weights.mul_(shares(log_sums, self.scores[:, None, None]))

    def add(self, d_scores: Float[Tensor, "tiles rows span"]) -> None:
        """Add the gradient: the gradients of a row's scores have the sum 0, that of the sink included."""
        if self.gradient is not None:
            self.gradient.sub_(d_scores.sum((1, 2)) if len(d_scores) == len(self.gradient) else d_scores.sum()[None])

    def collect(self, repeated: Sinks) -> None:
        """Add the gradients of the same heads once more, several times one behind another."""
        if self.gradient is not None and repeated.gradient is not None:
            self.gradient.add_(repeated.gradient.view(-1, len(self.gradient)).sum(0))

    def total(self, like: Float[Tensor, "some"]) -> Float[Tensor, "some"] | None:
        """The gradient of the scores that ``ready`` took."""
        return None if self.gradient is None else self.gradient.view(-1, *like.shape).sum(0).to(like.dtype)


def shares(
    log_sums: Float[Tensor, "*batch rows"], sinks: Float[Tensor, "*#batch #rows"]
) -> Float[Tensor, "*batch rows"]:
    """What keys with these logarithmic normalisers keep beside sinks: the sigmoid, which torch's own loses at e^-89."""
    return logsigmoid(log_sums - sinks).exp_()


def sink_gradient(
    sinks: Float[Tensor, "heads"],
    log_sums: Float[Tensor, "*batch heads length"],
    gradient: Float[Tensor, "*batch heads length values"],
    outputs: Float[Tensor, "*batch heads length values"],
) -> Float[Tensor, "heads"]:
    """The gradient of sinks, given the logarithms of the normalisers that hold them: a sink's value is zero."""
    weights = (sinks[:, None] - log_sums).exp_()
    return -(weights * (gradient * outputs).sum(-1)).sum(-1).view(-1, len(sinks)).sum(0).to(sinks.dtype)


class Tiling(NamedTuple):
    """The tiles of every group of ``heads`` heads; with ``block``, keys are contiguous and padded to whole blocks."""

    heads: int
    tiles: Callable[[slice], Iterable[Tile]]
    block: int = 0
    sinks: Sinks | None = None


def bias_of(visible: Bool[Tensor, "*some span"], dtype: torch.dtype) -> Float[Tensor, "*some span"] | None:
    """What is added to scores so that only ``visible`` keys get weight; None where all are visible."""
    return None if visible.all() else torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
