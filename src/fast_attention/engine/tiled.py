"""Computes softmax attention tile by tile: some queries against all keys that they see, with their scores in cache.

A family says which tiles there are (a ``Tiling``). The engine flattens heads, loops over groups of heads and tiles,
applies key masks, writes outputs in place and adds gradients where they belong. The weights of a tile are computed
again in the backward pass. They are torch's exact softmax, and a tile holds all keys of its queries, so that nothing is
rescaled: the error is that of the plain definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import logsigmoid

from fast_attention.engine.blocks import pad_length
from fast_attention.engine.workspace import Workspace

SCORES = 2**18  # of a tile: 1 MiB in float32, what two cores keep in their second-level caches


def heads_together(scores: int) -> int:
    """Heads whose ``scores`` each make a tile; two at least, one for each core."""
    return max(SCORES // scores, 2)


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


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
    tiling: Tiling,
    *,
    scale: float,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(scale q k^T + bias) v`` over the keys of each tile; a query that sees nothing gets zeros.

    With the tiling's ``sinks`` every normaliser is larger by ``e^sink``.
    """
    out, work = q.new_empty(*q.shape[:-1], v.shape[-1]), Workspace(q)
    visible, flat = _visible(key_mask, k, tiling.block), out.view(-1, *out.shape[-2:])
    q, k, v = flatten(q), flatten(k, tiling.block), flatten(v, tiling.block)
    k_memory, v_memory = partial(work, "k"), partial(work, "v")
    for tile, group, masked in _tiles(tiling, q.shape[0], visible):
        keys, values = tile.keys.read(k[group], k_memory), tile.keys.read(v[group], v_memory)
        rows = tile.queries.read(flat[group])
        written = rows if rows.is_contiguous() else work("out", *rows.shape)
        sinks = None if tiling.sinks is None else tiling.sinks.of(group)
        P = weights(tile.queries.read(q[group]), keys, tile.bias, masked, scale=scale, work=work, sinks=sinks)
        torch.bmm(P, values, out=written)
        if written is not rows:
            rows.copy_(written)
    return out


def gradients(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
    grad_out: Float[Tensor, "*batch length values"],
    tiling: Tiling,
    *,
    scale: float,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``attend`` for queries, keys and values; those of keys and values are added to ``start``.

    With ``P`` the weights, ``dV = P^T dO``, ``dS = P (dP - sum_j P dP)`` where ``dP = dO V^T``, ``dQ = scale dS K`` and
    ``dK = scale dS^T Q``.
    """
    work, block, (q_shape, k_shape, v_shape) = Workspace(q), tiling.block, (q.shape, k.shape, v.shape)
    visible = _visible(key_mask, k, block)
    q, k, v, grad_out = flatten(q), flatten(k, block), flatten(v, block), flatten(grad_out)
    dq = q.new_empty(q.shape)
    dk, dv = (x.new_zeros(x.shape) for x in (k, v)) if start is None else (flatten(x, block) for x in start)
    k_memory, v_memory = partial(work, "k"), partial(work, "v")
    for tile, group, masked in _tiles(tiling, q.shape[0], visible):
        queries, grad = tile.queries.read(q[group]), tile.queries.read(grad_out[group])
        keys, values = tile.keys.read(k[group], k_memory), tile.keys.read(v[group], v_memory)
        sinks = None if tiling.sinks is None else tiling.sinks.of(group)
        P = weights(queries, keys, tile.bias, masked, scale=scale, work=work, sinks=sinks)
        d_values = torch.bmm(P.mT, grad, out=work("dv", *values.shape))
        dS = torch.bmm(grad, values.mT, out=work("dS", *P.shape))
        torch.ops.aten._softmax_backward_data.out(dS, P, -1, P.dtype, grad_input=dS)
        if sinks is not None:
            sinks.add(dS)
        rows, d_keys = tile.queries.read(dq[group]), work("dk", *keys.shape)
        written = rows if rows.is_contiguous() else work("dq", *rows.shape)
        torch.baddbmm(written, dS, keys, beta=0, alpha=scale, out=written)
        if not (tile.bias is None or isinstance(tile.bias, Tensor)):
            tile.bias.add(dS, queries, written, work, scale=scale)
        torch.baddbmm(d_keys, dS.mT, queries, beta=0, alpha=scale, out=d_keys)
        if written is not rows:
            rows.copy_(written)
        tile.keys.add(d_keys, dk[group], k[group])
        tile.keys.add(d_values, dv[group], v[group])
    dk, dv = (dx.view(*shape[:-2], -1, shape[-1])[..., : shape[-2], :] for dx, shape in ((dk, k_shape), (dv, v_shape)))
    return dq.view(q_shape), dk, dv


def weights(
    q: Float[Tensor, "heads rows width"],
    k: Float[Tensor, "heads span width"],
    bias: Float[Tensor, "*#some span"] | Bias | None,
    masked: Bool[Tensor, "*#some span"] | None,
    *,
    scale: float,
    work: Workspace,
    sinks: Sinks | None = None,
) -> Float[Tensor, "heads rows span"]:
    """``softmax(scale q k^T + bias)``, less what sinks take; 0 where ``masked``, also in rows where everything is."""
    scores = work("scores", *q.shape[:2], k.shape[1])
    if bias is None:
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=scale, out=scores)
    elif isinstance(bias, Tensor):
        torch.baddbmm(bias, q, k.mT, alpha=scale, out=scores)
    else:
        bias.write(q, scores, work, scale=scale)
        torch.baddbmm(scores, q, k.mT, alpha=scale, out=scores)
    if masked is not None:
        scores.masked_fill_(masked, torch.finfo(scores.dtype).min)
    top = None if sinks is None or scores.shape[-1] == 0 else scores.amax(-1, keepdim=True)
    torch.softmax(scores, -1, out=scores)
    if sinks is not None and top is not None:
        sinks.weigh(scores, top)
    return scores if masked is None else scores.masked_fill_(masked, 0.0)


def flatten(x: Tensor, block: int = 0) -> Shaped[Tensor, "heads length E"]:
    """(..., length, E) with one axis of heads and neighbouring numbers in the last; in whole ``block``s contiguous."""
    x = pad_length(x, block) if block else x
    x = x.reshape(-1, *x.shape[-2:])
    return x.contiguous() if block or x.stride(-1) != 1 else x


def _visible(key_mask: Tensor | None, k: Tensor, block: int) -> Bool[Tensor, "heads keys 1"] | None:
    """The key mask of every head, laid out as keys are; None where all keys may be seen."""
    return None if key_mask is None or key_mask.all() else flatten(key_mask.expand(k.shape[:-1])[..., None], block)


def _tiles(tiling: Tiling, heads: int, visible: Tensor | None) -> Iterator[tuple[Tile, slice, Tensor | None]]:
    """Every tile, its group of heads, and what the tile or the key mask hides."""
    for first in range(0, heads, tiling.heads):
        group = slice(first, first + tiling.heads)
        for tile in tiling.tiles(group):
            masked = tile.masked
            if visible is not None:
                unmasked = tile.keys.read(visible[group], visible.new_empty)[..., 0]
                if not unmasked.all():
                    masked = ~unmasked[:, None] if masked is None else masked | ~unmasked[:, None]
            yield tile, group, masked
