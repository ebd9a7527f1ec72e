"""Tiles of scores to which positions add: numbers and products written along diagonals, and their gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine.offsets import Terms, diagonals, toeplitz
from fast_attention.engine.workspace import Workspace


class Relative(NamedTuple):
    """What positions add to a tile of some heads, or of several chunks of one head: a tile's ``Bias``.

    Offsets are counted as the terms are. Where the tile is a band, a number of each offset is written along its
    diagonals; where queries meet vectors, their products are.
    """

    terms: Terms
    gradients: Terms | None  # of the terms, to be added to; None: they are not wanted
    first: int  # the offset of the first query and the first key
    limits: tuple[int, int] | None  # the first and last visible offset; None: more than the offset decides
    bias: Float[Tensor, "heads rows span"]  # the numbers; minus infinity where a key is not visible
    d_bias: Float[Tensor, "heads rows span"] | None  # their gradient in tiles that are no bands

    def part(self, rows: slice, columns: slice) -> Relative:
        """Some rows and columns of the tile."""
        first = self.first + columns.start - rows.start
        d_bias = None if self.d_bias is None else self.d_bias[:, rows, columns]
        return self._replace(first=first, bias=self.bias[:, rows, columns], d_bias=d_bias)

    def write(self, q: Float[Tensor, "tiles rows width"], scores: Tensor, work: Workspace, *, scale: float) -> None:
        """Write into ``scores`` (tiles, rows, span) what positions add."""
        vectors, offsets = self.terms.vectors, self._offsets()
        if scores.shape[-1] == 0 or vectors is None:
            scores.copy_(self.bias)
            return
        inside, band = self._along(scores, offsets, work)
        if inside is scores:
            scores.fill_(float("-inf"))
            band.copy_(self.terms.numbers[:, None, offsets])
        else:
            inside.copy_(self.bias)
        if vectors is not None:
            torch.baddbmm(band, q, _chosen(vectors, offsets, q).mT, alpha=scale, out=band)
        if inside is not scores:
            scores.copy_(inside)

    def add(self, d_scores: Tensor, q: Tensor, dq: Tensor, work: Workspace, *, scale: float) -> None:
        """Add the gradients of the terms, and to ``dq`` that of the queries."""
        (numbers, d_vectors), offsets = self.gradients or (None, None), self._offsets()
        if not (is_band := self._is_band(offsets)) and self.d_bias is not None:
            self.d_bias.add_(_by_head(d_scores, self.d_bias))
        if d_scores.shape[-1] == 0 or not (self.terms.vectors is not None or is_band):
            return
        inside, band = self._along(d_scores, offsets, work)
        if inside is not d_scores:
            band.zero_()
            inside.copy_(d_scores)
        elif numbers is not None:
            numbers[:, offsets].add_(_by_head(band.sum(1), numbers))
        if self.terms.vectors is not None:
            torch.baddbmm(dq, band, _chosen(self.terms.vectors, offsets, q), alpha=scale, out=dq)
            if d_vectors is not None:
                d_vectors[:, offsets].add_(_by_head(torch.bmm(band.mT, q), d_vectors), alpha=scale)

    def _offsets(self) -> slice:
        """The visible offsets of the tile, and those at its lower left and upper right corners."""
        rows, span = self.bias.shape[-2:]
        low, high = self.first - rows + 1, self.first + span - 1
        if self.limits is not None:
            low, high = max(low, self.limits[0]), min(high, self.limits[1])
        return slice(min(low, self.first), max(high, self.first + span - rows, self.first) + 1)

    def _is_band(self, offsets: slice) -> bool:
        """Whether every row has all of the offsets, and sees no other key."""
        rows, span = self.bias.shape[-2:]
        return self.limits is not None and offsets.stop - offsets.start + rows - 1 == span

    def _along(self, scores: Tensor, offsets: slice, work: Workspace) -> tuple[Tensor, Tensor]:
        """Memory in which every row has room for all ``offsets``: of it the tile, and the offsets of each row.

        It is that of ``scores`` itself where the tile is a band.
        """
        tiles, rows, span = scores.shape
        number, before = offsets.stop - offsets.start, self.first - offsets.start
        width, is_band = number + rows - 1, self._is_band(offsets)
        space = scores if is_band else work("space", tiles, rows, width)
        band = space.as_strided((tiles, rows, number), (rows * width, width + 1, 1))
        return scores if is_band else space[..., before : before + span], band


def _chosen(vectors: Tensor, offsets: slice, q: Tensor) -> Float[Tensor, "tiles offsets width"]:
    return vectors[:, offsets].expand(len(q), -1, -1)


def _by_head(gradient: Tensor, total: Tensor) -> Tensor:
    """The gradients of the tiles of several heads; of those of one head their sum."""
    return gradient if len(gradient) == len(total) else gradient.sum(0, keepdim=True)


class Grouped:
    """The terms of a group of heads, of which tiles are made, and the gradients that these gather.

    Args:
        terms: Of all heads of one sequence.
        heads: The group, among the heads of all sequences.
        into: Gradients of ``terms``, to which ``collect`` adds; None: they are not wanted.
    """

    def __init__(self, terms: Terms, heads: range, into: Terms | None) -> None:
        self.into, self._tiles = into, list[tuple[Tensor, Relative]]()
        self.heads = torch.arange(heads.start, heads.stop, device=terms.numbers.device) % len(terms.numbers)
        self.terms = terms.of_heads(self.heads)
        self.gradients = None if into is None else self.terms.zeros()

    def tile(self, visible: Bool[Tensor, "rows span"], first: int) -> Relative:
        """A tile whose first query and first key have offset number ``first``; the same again for the same mask."""
        for mask, tile in self._tiles:
            if tile.first == first and mask.equal(visible):
                return tile
        rows, span = visible.shape
        bias = self.terms.numbers.new_empty(len(self.heads), rows, span)
        written = toeplitz(self.terms.numbers[:, first - rows + 1 : first + span], rows)
        torch.where(visible, written, written.new_tensor(float("-inf")), out=bias)
        columns, lines = (torch.arange(n, device=visible.device) for n in (span, rows))
        index = columns - lines[:, None] + first
        low = int(index.masked_fill(~visible, first + span).min())
        high = int(index.masked_fill(~visible, first - rows).max())
        limits = (low, high) if visible.equal((index >= low) & (index <= high)) else None
        d_bias = None if self.gradients is None else torch.zeros_like(bias)
        tile = Relative(self.terms, self.gradients, first, limits, bias, d_bias)
        self._tiles.append((visible, tile))
        return tile

    def collect(self) -> None:
        """Add what the tiles have gathered, once no more of it comes."""
        if self.into is None or self.gradients is None:
            return
        for _, tile in self._tiles:
            assert tile.d_bias is not None
            rows, span = tile.d_bias.shape[-2:]
            self.gradients.numbers[:, tile.first - rows + 1 : tile.first + span].add_(diagonals(tile.d_bias))
        for total, part in zip(self.into, self.gradients, strict=True):
            if total is not None and part is not None:
                total.index_add_(0, self.heads, part)
