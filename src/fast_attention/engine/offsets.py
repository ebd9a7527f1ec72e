"""What scores gain by the offset of the key, its position minus the query's: a number, or a product with the query.

In a tile the offset falls by one from row to row: so a tile of numbers is made of as many as it has diagonals
(Toeplitz), and products of queries with as many vectors are written along the diagonals, by a view. Neither is ever as
large as queries times keys of a whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine.workspace import Workspace


class Terms(NamedTuple):
    """Of every head and of neighbouring offsets: ``numbers`` that are added to scores, ``vectors`` that queries meet.

    With the factor ``scale`` of products a score is ``scale (q . k + q . vector) + number``.
    """

    numbers: Float[Tensor, "heads offsets"]
    vectors: Float[Tensor, "heads offsets width"] | None = None

    def of_heads(self, chosen: slice | Tensor) -> Terms:
        """Those of some heads."""
        return Terms(self.numbers[chosen], None if self.vectors is None else self.vectors[chosen])

    def zeros(self) -> Terms:
        """Gradients yet to be added to."""
        return Terms(*(None if x is None else torch.zeros_like(x) for x in self))  # type: ignore[arg-type]


Positions = Callable[[Int[Tensor, "offsets"]], Terms]  # the terms of given offsets


def between(positions: Positions | None, first: int, number: int, like: Tensor) -> Terms | tuple[None, None]:
    """The terms of ``number`` offsets from ``first`` on, on the device of ``like``; two None without ``positions``."""
    return (None, None) if positions is None else positions(torch.arange(number, device=like.device) + first)


def ready(numbers: Tensor | None, vectors: Tensor | None, like: Tensor) -> tuple[Terms | None, Terms | None]:
    """The terms in the dtype of ``like``, and their gradients yet to be added to where they are wanted."""
    if numbers is None:
        return None, None
    terms = Terms(numbers.to(like.dtype), None if vectors is None else vectors.to(like.dtype))
    wanted = any(x is not None and x.requires_grad for x in (numbers, vectors))
    return terms, terms.zeros() if wanted else None


def scores(
    q: Float[Tensor, "*batch rows width"], terms: Terms, span: int, *, scale: float
) -> Float[Tensor, "*#batch rows span"]:
    """What positions add to the scores of queries and ``span`` keys, plain and differentiable.

    ``terms`` are of all ``rows + span - 1`` offsets, those of the last query first; they broadcast against queries.
    """
    rows = q.shape[-2]
    index = torch.arange(span, device=q.device) - torch.arange(rows, device=q.device)[:, None] + (rows - 1)
    numbers = terms.numbers[..., index]
    if terms.vectors is None:
        return numbers
    products = q @ terms.vectors.mT * scale
    return numbers + products.gather(-1, index.expand(*products.shape[:-2], *index.shape))


def toeplitz(x: Float[Tensor, "*lead n"], rows: int) -> Float[Tensor, "*lead rows span"]:
    """Row r holds in column c the number ``c - r + rows - 1`` of ``n = rows + span - 1``."""
    return x.unfold(-1, x.shape[-1] - rows + 1, 1).flip(-2)


def diagonals(tile: Float[Tensor, "*lead rows span"]) -> Float[Tensor, "*lead n"]:
    """The sums along the diagonals of a tile: the gradient of ``toeplitz``."""
    rows, span = tile.shape[-2:]
    padded = tile.new_zeros(*tile.shape[:-1], rows + span)
    padded[..., :span] = tile.flip(-2)
    skewed = padded.flatten(-2)[..., : rows * (rows + span - 1)]
    return skewed.unflatten(-1, (rows, rows + span - 1)).sum(-2)


class Relative(NamedTuple):
    """What positions add to a tile of some heads, or of several chunks of one head: a tile's ``Bias``."""

    bias: Float[Tensor, "heads rows span"]  # the numbers; minus infinity where a key is not visible
    d_bias: Float[Tensor, "heads rows span"] | None  # their gradient, to be added to; None: it is not wanted
    first: int  # the offset of the first query and the first key, as a number of the terms
    vectors: Float[Tensor, "heads offsets width"] | None = None
    d_vectors: Float[Tensor, "heads offsets width"] | None = None

    def part(self, rows: slice, columns: slice) -> Relative:
        """Some rows and columns of the tile."""
        d_bias = None if self.d_bias is None else self.d_bias[:, rows, columns]
        first = self.first + columns.start - rows.start
        return Relative(self.bias[:, rows, columns], d_bias, first, self.vectors, self.d_vectors)

    def write(self, q: Float[Tensor, "tiles rows width"], scores: Tensor, work: Workspace, *, scale: float) -> None:
        """Write into ``scores`` (tiles, rows, span) what positions add."""
        if self.vectors is None or scores.shape[-1] == 0:
            scores.copy_(self.bias)
            return
        offsets = self._offsets()
        space, inside, band = self._band(scores, offsets, work)
        inside.copy_(self.bias)
        torch.baddbmm(band, q, self._chosen(self.vectors, offsets, q).mT, alpha=scale, out=band)
        if space is not scores:
            scores.copy_(inside)

    def add(self, d_scores: Tensor, q: Tensor, dq: Tensor, work: Workspace, *, scale: float) -> None:
        """Add the gradients of numbers and vectors, and to ``dq`` that of the queries."""
        if self.d_bias is not None:
            self.d_bias.add_(d_scores if len(d_scores) == len(self.d_bias) else d_scores.sum(0, keepdim=True))
        if self.vectors is None or d_scores.shape[-1] == 0:
            return
        offsets = self._offsets()
        space, inside, band = self._band(d_scores, offsets, work)
        if space is not d_scores:
            space.zero_()
            inside.copy_(d_scores)
        torch.baddbmm(dq, band, self._chosen(self.vectors, offsets, q), alpha=scale, out=dq)
        if self.d_vectors is not None:
            d_vectors = torch.bmm(band.mT, q).mul_(scale)
            self.d_vectors[:, offsets].add_(
                d_vectors if len(q) == len(self.d_vectors) else d_vectors.sum(0, keepdim=True)
            )

    def _offsets(self) -> slice:
        """The offsets that are visible, as numbers of the terms, and those that the tile has at its corners."""
        rows, span = self.bias.shape[-2:]
        index = torch.arange(span) - torch.arange(rows)[:, None] + self.first
        index = index[self.bias[0] > float("-inf")]
        low, high = self.first, self.first + span - rows
        if len(index):
            low, high = min(low, int(index.min())), max(high, int(index.max()))
        return slice(low, max(low, high) + 1)

    def _band(self, scores: Tensor, offsets: slice, work: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        """Memory in which every row has room for all ``offsets``, and of it the tile and the offsets of each row.

        It is that of ``scores`` where the tile has room for them, as a window's has.
        """
        tiles, rows, span = scores.shape
        number, before = offsets.stop - offsets.start, self.first - offsets.start
        width = number + rows - 1
        space = scores if width == span else work("space", tiles, rows, width)
        band = space.as_strided((tiles, rows, number), (rows * width, width + 1, 1))
        return space, space[..., before : before + span], band

    @staticmethod
    def _chosen(vectors: Tensor, offsets: slice, q: Tensor) -> Float[Tensor, "tiles offsets width"]:
        return vectors[:, offsets].expand(len(q), -1, -1)


class Grouped:
    """The terms of a group of heads, of which tiles are made, and the gradients that these gather.

    Args:
        terms: Of all heads of one sequence.
        heads: The group, among the heads of all sequences.
        into: Gradients of ``terms``, to which ``collect`` adds; None: they are not wanted.
    """

    def __init__(self, terms: Terms, heads: range, into: Terms | None) -> None:
        self.into, self._tiles = into, list[Relative]()
        self.heads = torch.arange(heads.start, heads.stop) % len(terms.numbers)
        self.terms = terms.of_heads(self.heads)
        self.gradients = None if into is None else self.terms.zeros()

    def tile(self, visible: Bool[Tensor, "rows span"], first: int) -> Relative:
        """A tile whose first query and first key have offset number ``first``."""
        rows, span = visible.shape
        bias = toeplitz(self.terms.numbers[:, first - rows + 1 : first + span], rows)
        bias = bias.masked_fill_(~visible, float("-inf"))
        d_bias, d_vectors = None, None
        if self.gradients is not None:
            d_bias, d_vectors = torch.zeros_like(bias), self.gradients.vectors
        tile = Relative(bias, d_bias, first, self.terms.vectors, d_vectors)
        self._tiles.append(tile)
        return tile

    def collect(self) -> None:
        """Add what the tiles have gathered, once no more of it comes."""
        if self.into is None or self.gradients is None:
            return
        for tile in self._tiles:
            assert tile.d_bias is not None
            rows, span = tile.d_bias.shape[-2:]
            self.gradients.numbers[:, tile.first - rows + 1 : tile.first + span] += diagonals(tile.d_bias)
        for total, part in zip(self.into, self.gradients, strict=True):
            if total is not None and part is not None:
                total.index_add_(0, self.heads, part)
