"""Position terms: what scores gain by the offset of the key, a number or a product with the query.

In a tile the offset falls by one from row to row: so a tile of numbers is made of as many as it has diagonals
(Toeplitz), and of the products of queries with as many vectors each row reads its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fast_attention.engine.heads import by_head


class Terms(NamedTuple):
    """Position terms of every head for neighbouring offsets: ``numbers`` are added to scores, ``vectors`` meet queries.

    With the factor ``scale`` of products a score is ``scale (q . k + q . vector) + number``.
    """

    numbers: Float[Tensor, "heads offsets"]
    vectors: Float[Tensor, "heads offsets width"] | None = None

    def of_heads(self, chosen: slice | Tensor) -> Terms:
        """Select the terms of some heads."""
        return Terms(self.numbers[chosen], None if self.vectors is None else self.vectors[chosen])


Positions = Callable[[Int[Tensor, "offsets"]], Terms]  # the terms of given offsets


def between(positions: Positions | None, first: int, number: int, like: Tensor) -> Terms | tuple[None, None]:
    """The terms of ``number`` offsets from ``first`` on, on the device of ``like``; two None without ``positions``."""
    return (None, None) if positions is None else positions(torch.arange(number, device=like.device) + first)


def scores(
    q: Float[Tensor, "*batch rows width"], terms: Terms, span: int, *, scale: float
) -> Float[Tensor, "*#batch rows span"]:
    """The scores that positions add for queries and ``span`` keys, plain and differentiable.

    ``terms`` are of all ``rows + span - 1`` offsets, those of the last query first; they broadcast against queries.
    """
    rows = q.shape[-2]
    index = torch.arange(span, device=q.device) - torch.arange(rows, device=q.device)[:, None] + (rows - 1)
    numbers = terms.numbers[..., index]
    if terms.vectors is None:
        return numbers
    products = by_head(q, terms.vectors.mT) * scale
    return numbers + products.gather(-1, index.expand(*products.shape[:-2], *index.shape))


def gathered(
    q: Float[Tensor, "*batch heads blocks rows width"], terms: Terms, index: Int[Tensor, "*#batch heads blocks rows n"],
    *, scale: float,
) -> Float[Tensor, "*batch heads blocks rows n"]:  # fmt: skip
    """The scores that positions add for blocks of queries and keys, whose offsets are numbers ``index`` of terms."""
    head = torch.arange(index.shape[-4], device=q.device)[:, None, None, None]
    numbers = terms.numbers[head, index]
    if terms.vectors is None:
        return numbers
    products = q @ terms.vectors[:, None].mT * scale
    return numbers + products.gather(-1, index.expand(*products.shape[:-1], index.shape[-1]))


def toeplitz(x: Float[Tensor, "*batch n"], rows: int) -> Float[Tensor, "*batch rows span"]:
    """Row r holds in column c the number ``c - r + rows - 1`` of ``n = rows + span - 1``."""
    return x.unfold(-1, x.shape[-1] - rows + 1, 1).flip(-2)
