"""Softmax of blocks of queries over gathered blocks of keys, in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import dispatch, offsets, tiled
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.fused import flash_backward, flash_forward, takes_flash
from fast_attention.engine.offsets import Positions, Terms, diagonals, toeplitz
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.relative import Grouped
from fast_attention.engine.tiled import Blocks, Sinks, Span, Tile, Tiling, bias_of
from fast_attention.engine.workspace import Workspace
from fast_attention.gpu import flex, patterns
from fast_attention.mechanisms.sparse import reference
from fast_attention.mechanisms.sparse.reference import ends, first_named, with_ends


def gathered_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    table: Int[Tensor, "*batch blocks choices"],
    key_mask: Bool[Tensor, "*#batch2 length"],
    *,
    size: int,
    is_causal: bool = False,
    scale: float | None = None,
    start: int = 0,
    stop: int | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of every block of ``size`` queries over the blocks of keys that ``table`` names.

    A block named twice counts once, -1 names none, and a query that sees nothing gets zeros. The blocks of queries
    before ``start`` and from ``stop`` on see all keys, whatever the table and ``key_mask`` say. ``bias`` gives what
    scores gain by offsets, and ``sinks`` make normalisers larger by ``e^sink``: both for blocks in the table only.
    """
    factor, stop = float(q.shape[-1] ** -0.5 if scale is None else scale), table.shape[-2] if stop is None else stop
    if bias is None and sinks is None and flex.SIZE % size == 0 and not patterns.obstacle(q, k, v, key_mask):
        visible = patterns.chosen(q, table, size=size, is_causal=is_causal, start=start, stop=stop)
        return flex.attend(q, k, v, visible, key_mask, scale=factor)
    terms, length = (None, None), q.shape[-2]
    if bias is not None:
        terms = bias(torch.arange(1 - length, length, device=q.device))
    settings: Any = {"size": size, "is_causal": is_causal, "start": start, "stop": stop, "scale": factor}
    return _gathered(q, k, v, table, key_mask, *terms, sinks, **settings)


@opaque(like_queries)
def _gathered(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, *, size: int, is_causal: bool, start: int, stop: int, scale: float,
) -> Tensor:  # fmt: skip
    sizes, number = {"rows": size, "choices": table.shape[-1]}, table.shape[-2]
    tensors: Any = (q, k, v, table, key_mask, numbers, vectors, sinks)
    settings: Any = {"size": size, "is_causal": is_causal, "scale": scale}
    if why := dispatch.obstacle(q, k):
        dispatch.record("softmax in blocks", why, **sizes)
        plain = reference.gathered_softmax if numbers is None else in_float32(reference.gathered_softmax)
        return plain(*tensors, **settings, start=start, stop=stop)
    dispatch.record("softmax in tiles", "every block of queries reads a few blocks of keys", **sizes)
    if (start == 0 and stop == number) or takes_flash(q, k, v, scale=scale):
        return _tiled(*tensors, **settings, start=start, stop=stop)
    out = _tiled(*tensors, **settings, start=0, stop=number)
    return with_ends(out, q, k, v, start * size, stop * size, scale=scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, key_mask: Tensor, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, *, keep: bool, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Kept are the ends' normalisers, and the ends' outputs as the kernel laid them out."""
    terms = offsets.ready(numbers, vectors, q)
    tiling = _tiling(k, table, start, stop, *terms, Sinks.ready(sinks, q), size=size, is_causal=is_causal)
    out, first, last = tiled.attend(q, k, v, key_mask, tiling, scale=scale), start * size, stop * size
    if first == 0 and last >= q.shape[-2]:
        return out, ()
    rows, kept = flash_forward(ends(q, first, last), k, v, None, keep=keep, is_causal=False, scale=scale)
    out[..., :first, :], out[..., last:, :] = rows[..., :first, :], rows[..., first:, :]
    return out, (rows, *kept)


def tile_gradients(
    inputs: tuple[Any, ...], outputs: Tensors, kept: tuple[Tensor, ...], gradient: tuple[Tensor, ...],
    *, size: int, is_causal: bool, scale: float, start: int, stop: int,
) -> Tensors:  # fmt: skip
    """The gradients of queries, keys, values, of what positions add and of sinks, tile by tile."""
    q, k, v, table, key_mask, numbers, vectors, sinks = inputs
    (terms, into), every = offsets.ready(numbers, vectors, q), Sinks.ready(sinks, q)
    tiling = _tiling(k, table, start, stop, terms, into, every, size=size, is_causal=is_causal)
    if not kept:
        grads = tiled.gradients(q, k, v, key_mask, gradient[0], tiling, scale=scale)
        return *grads, None, None, *(into or (None, None)), None if every is None else every.total(sinks)
    first, last = start * size, stop * size
    rows, grad = (ends(q, first, last), k, v, None), ends(gradient[0], first, last)
    d_rows, dk, dv, _ = flash_backward(rows, kept[:1], kept[1:], (grad,), is_causal=False, scale=scale)
    assert d_rows is not None
    assert dk is not None
    assert dv is not None
    dq, dk, dv = tiled.gradients(q, k, v, key_mask, gradient[0], tiling, scale=scale, start=(dk, dv))
    dq[..., :first, :], dq[..., last:, :] = d_rows[..., :first, :], d_rows[..., first:, :]
    return dq, dk, dv, None, None, None, None, None


_tiled = in_float32(CustomGradient(reference.gathered_softmax, _forward, tile_gradients))


class GatheredBias(NamedTuple):
    """A tile's ``Bias``: every head and block of keys has offsets of its own, ``rows + size - 1`` neighbouring ones."""

    terms: Terms
    gradients: Terms | None  # to be added to; None: they are not wanted
    first: Int[Tensor, "heads choices"]  # of the terms, the one of the first query and each block's first key
    size: int
    visible: Float[Tensor, "rows span"] | None  # 0 or minus infinity, for all heads; None: all is visible

    def write(self, q: Float[Tensor, "heads rows width"], scores: Tensor, work: Workspace, *, scale: float) -> None:
        """Write into ``scores`` (heads, rows, choices * size) what positions add."""
        heads, rows, _ = scores.shape
        index, blocks = self._index(rows), scores.view(heads, rows, -1, self.size)
        numbers = self.terms.numbers.gather(1, index.flatten(1)).view(index.shape)
        blocks.copy_(toeplitz(numbers, rows).transpose(1, 2))
        if self.terms.vectors is not None:
            products, skewed = self._products(work, rows)
            torch.bmm(q, self._chosen(index).mT, out=products)
            blocks.add_(skewed, alpha=scale)
        if self.visible is not None:
            scores.add_(self.visible)

    def add(self, d_scores: Tensor, q: Tensor, dq: Tensor, work: Workspace, *, scale: float) -> None:
        """Add the gradients of the terms, and to ``dq`` that of the queries."""
        heads, rows, _ = d_scores.shape
        index, blocks = self._index(rows), d_scores.view(heads, rows, -1, self.size)
        numbers, vectors = self.gradients or (None, None)
        if numbers is not None:
            numbers.scatter_add_(1, index.flatten(1), diagonals(blocks.transpose(1, 2)).flatten(1))
        if self.terms.vectors is None:
            return
        products, skewed = self._products(work, rows)
        products.zero_()
        skewed.copy_(blocks)
        torch.baddbmm(dq, products, self._chosen(index), alpha=scale, out=dq)
        if vectors is not None:
            flat = index.flatten(1) + torch.arange(heads, device=index.device)[:, None] * vectors.shape[1]
            vectors.flatten(0, 1).index_add_(0, flat.flatten(), torch.bmm(products.mT, q).flatten(0, 1), alpha=scale)

    def _index(self, rows: int) -> Int[Tensor, "heads choices offsets"]:
        """The offsets of every block of keys; those of padded keys, which are masked, are some others."""
        index = self.first[..., None] + torch.arange(1 - rows, self.size, device=self.first.device)
        return index.clamp_(0, self.terms.numbers.shape[1] - 1)

    def _chosen(self, index: Tensor) -> Float[Tensor, "heads choices_times_offsets width"]:
        assert self.terms.vectors is not None
        width = self.terms.vectors.shape[-1]
        return self.terms.vectors.gather(1, index.flatten(1)[..., None].expand(-1, -1, width))

    def _products(self, work: Workspace, rows: int) -> tuple[Tensor, Tensor]:
        """Memory for the products of every query with all vectors, and a view of those of its own offsets."""
        heads, choices = self.first.shape
        each = rows + self.size - 1
        products = work("products", heads, rows, choices * each)
        strides = rows * choices * each, choices * each - 1, each, 1
        return products, products.as_strided((heads, rows, choices, self.size), strides, rows - 1)


class Pattern:
    """Which blocks of ``size`` keys every block of queries sees: ``table`` (heads, blocks, choices), -1 for none.

    Choices that are dead for all heads (named twice, none, or all in the future) are not read. What some heads see and
    others not is ``masked``; where all heads agree, the triangle of a causal block and the end of the sequence are a
    ``bias`` that many tiles share.
    """

    def __init__(self, table: Tensor, like: Tensor, group: int, *, size: int, is_causal: bool) -> None:
        self.length, self.dtype, self.size, self.is_causal = like.shape[-2], like.dtype, size, is_causal
        heads, blocks, _ = table.shape
        query_block = torch.arange(blocks, device=table.device)[:, None]
        alive = first_named(table)
        alive = alive & (table <= query_block) if is_causal else alive
        order = alive.any(0).byte().argsort(dim=-1, descending=True, stable=True).expand_as(table)  # the dead come last
        self.alive, self.table = alive.gather(-1, order), table.gather(-1, order)
        some, every = self.alive.any(0), self.alive.all(0)
        self.agreed, self.choices = (some == every).all(-1).tolist(), some.sum(-1).tolist()
        head = torch.arange(heads, device=table.device) % group
        self.index = self.table.clamp(min=0) + head[:, None, None] * blocks
        self.diagonal = self._choice_of(query_block if is_causal else torch.full_like(query_block, -2))
        self.end = self._choice_of(torch.full_like(query_block, blocks - 1 if self.length % size else -2))
        self.biases: dict[tuple[int, ...], Tensor | None] = {}

    def _choice_of(self, block: Tensor) -> list[int]:
        """Per block of queries: the choice that names ``block`` for all heads, -1 for no head, -2 for some."""
        named = self.alive & (self.table == block)
        choice = torch.where(named.all(0).any(-1), named.all(0).byte().argmax(-1), -1)
        return choice.masked_fill((named.any(0) != named.all(0)).any(-1), -2).tolist()

    def tile(self, i: int, group: slice) -> Tile:
        """Block ``i`` of queries against its choices."""
        number, size = self.choices[i], self.size
        queries = Span(i * size, min(size, self.length - i * size))
        keys = Blocks(self.index[group, i, :number].flatten(), size)
        diagonal, end = self.diagonal[i], self.end[i]
        if self.agreed[i] and diagonal > -2 and end > -2 and number > 0:
            bias = self._bias(number, diagonal, end)
            return Tile(queries, keys, None if bias is None else bias[: queries.size])
        positions = self.table[group, i, :number, None] * size + torch.arange(size, device=self.table.device)
        visible = (self.alive[group, i, :number, None] & (positions < self.length)).flatten(1)[:, None]
        if self.is_causal:
            rows = torch.arange(queries.first, queries.first + queries.size, device=positions.device)[:, None]
            visible = visible & (positions.flatten(1)[:, None] <= rows)
        return Tile(queries, keys, masked=~visible)

    def biased(self, i: int, group: slice, terms: Grouped) -> Tile:
        """The same with what positions add."""
        tile, size = self.tile(i, group), self.size
        first = (self.table[group, i, : self.choices[i]].clamp(min=0) - i) * size + (self.length - 1)
        visible = tile.bias if isinstance(tile.bias, Tensor) else None
        return tile._replace(bias=GatheredBias(terms.terms, terms.gradients, first, size, visible))

    def _bias(self, number: int, diagonal: int, end: int) -> Tensor | None:
        key = number, diagonal, end
        if key not in self.biases:
            visible = self.alive.new_ones(self.size, number, self.size)
            if end >= 0:
                visible[:, end, self.length % self.size :] = False
            if diagonal >= 0:
                visible[:, diagonal] &= self.alive.new_ones(self.size, self.size).tril()
            self.biases[key] = bias_of(visible.flatten(1), self.dtype)
        return self.biases[key]


def _tiling(
    k: Tensor, table: Tensor, start: int, stop: int, terms: Terms | None, into: Terms | None, sinks: Sinks | None,
    *, size: int, is_causal: bool,
) -> Tiling:  # fmt: skip
    """One tile for each block of queries from ``start`` to ``stop`` and each group of heads."""
    table = table.expand(*k.shape[:-2], *table.shape[-2:]).reshape(-1, *table.shape[-2:])
    heads = tiled.heads_together(size * size * table.shape[-1])
    pattern = Pattern(table, k, heads, size=size, is_causal=is_causal)
    if terms is None:
        return Tiling(heads, lambda group: (pattern.tile(i, group) for i in range(start, stop)), size, sinks)

    def biased(group: slice) -> Iterator[Tile]:
        grouped = Grouped(terms, range(group.start, min(group.stop, len(table))), into)
        yield from (pattern.biased(i, group, grouped) for i in range(start, stop))
        grouped.collect()

    return Tiling(heads, biased, size, sinks)
