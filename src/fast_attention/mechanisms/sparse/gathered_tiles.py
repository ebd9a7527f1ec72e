"""The tiles of blocks of queries over gathered blocks of keys: what is read, and what is masked of it."""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine.relative import Grouped
from fast_attention.engine.tiling import Blocks, Span, Tile, bias_of
from fast_attention.mechanisms.sparse.gathered_bias import GatheredBias
from fast_attention.mechanisms.sparse.reference import first_named


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
