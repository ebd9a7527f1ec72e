"""What positions add to blocks of queries and the blocks of keys that each head has gathered for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fast_attention.engine.offsets import Terms, diagonals, toeplitz
from fast_attention.engine.workspace import Workspace


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
