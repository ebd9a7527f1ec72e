"""Computes the weights of one round of hashing: its tokens gathered into slots, chunk by chunk, in cache.

Two kinds of pairs of chunks meet in every round: every chunk with itself, and with the one before it. Slots are laid
out so that both are slices of one table (``layout.lay_out``): no product gathers or copies anything. Since keys have
length 1, ``|s_ij| <= scale |q_i|``: weights are plain exponentials without a maximum taken off wherever that is at most
``IN_RANGE``, so rounds are added up as they are. For the queries beyond it the largest score is found first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.lsh.layout import Block, Order, lay_out
from fast_attention.mechanisms.lsh.reference import SHORTEST, Rules

IN_RANGE = 32.0  # scores up to this need no maximum: exp(-2 IN_RANGE) is far above the smallest float32
PAIRS = 1 << 19  # query-key pairs that are worked on at once: a megabyte for each of two cores
FAR = 1e30
LOG2E = math.log2(math.e)  # exp2 takes half the time of exp, and the factor joins another


class Pairs(NamedTuple):
    """Pairs of a round's chunks: those of the queries and those of the keys."""

    queries: Block
    keys: Block
    same: bool  # every chunk with itself


class Lanes:
    """The tokens of some lanes, laid end to end, and the chunks of every round."""

    def __init__(self, q: Tensor, others: list[Tensor], order: Order, rules: Rules, workspace: Workspace) -> None:
        """``q`` (T, E) and what is gathered beside the keys (T, X)."""
        self.rules, self.workspace = rules, workspace
        length = q.norm(dim=-1, keepdim=True)
        self.short, self.length = length < SHORTEST, length.clamp_(min=SHORTEST)  # a short one is not made longer
        self.widths = [x.shape[-1] for x in (q, *others)]
        self.rows = workspace("rows", len(q), sum(self.widths))
        self.k, *rest = self.rows.split(self.widths, -1)
        torch.div(q, self.length, out=self.k)
        for columns, x in zip(rest, others, strict=True):
            columns.copy_(x)
        self.factor = self.length * (rules.scale * LOG2E)
        self.rounds = lay_out(order, size=rules.size, ranked=rules.ranked, across=rules.across, dtype=q.dtype)
        ones = torch.ones(rules.size, rules.size, dtype=q.dtype, device=q.device)
        self.visible = ones.tril_(-1) if rules.is_causal else ones.fill_diagonal_(0.0)

    def log_scale(self) -> Tensor | None:
        """Per token the largest score that counts, in log2, where it may pass ``IN_RANGE``, else 0; None: nowhere."""
        needs_rescaling = (self.factor.abs() > IN_RANGE * LOG2E)[:, 0]
        if not bool(needs_rescaling.any()):
            return None
        largest = torch.full_like(needs_rescaling, -FAR, dtype=self.rows.dtype)
        for r, chunks in enumerate(self.rounds):
            by_slot = largest.new_full((chunks.most + 1,), -FAR)
            this = Round(self, r, None)
            for pairs in this.pairs():
                scores = this.scores(pairs)
                counts = this.prune(torch.ones_like(scores), pairs)
                best = scores.add_(counts.sub_(1.0).mul_(FAR)).amax(-1)
                rows = pairs.queries.of(by_slot)
                torch.maximum(rows, best, out=rows)
            largest = torch.maximum(largest, by_slot.take(chunks.back))
        return largest.masked_fill(~needs_rescaling | (largest <= -FAR / 2), 0.0)

    def slots(self, name: str, *shape: int) -> Tensor:
        """Memory for the slots of any round, and one slot of zeros more."""
        memory = self.workspace(name, self.rounds[0].most + 1, *shape)
        memory[-1] = 0.0
        return memory

    def collect(self, sums: Tensor, slots: Tensor, r: int) -> None:
        """Add the slots (n, ...) of round ``r`` to the tokens' ``sums`` (T, ...), or set them; masked tokens get 0."""
        gathered = sums if r == 0 else self.workspace("gathered", *sums.shape)
        torch.index_select(slots, 0, self.rounds[r].back, out=gathered)
        if r:
            sums.add_(gathered)


class Round:
    """The chunks of one round with their rows gathered."""

    def __init__(self, lanes: Lanes, r: int, log_scale: Tensor | None) -> None:
        """``log_scale`` (T,) is taken off the scores."""
        self.lanes, self.rules, self.chunks = lanes, lanes.rules, lanes.rounds[r]
        table = self.chunks.table
        rows = torch.index_select(lanes.rows, 0, table, out=lanes.workspace("slots", len(table), lanes.rows.shape[-1]))
        self.k, *self.rest = rows.split(lanes.widths, -1)
        self.factor = lanes.factor.take(table)[..., None]
        self.log_scale = None if log_scale is None else log_scale.take(table)[..., None]
        known = lanes.rounds[: r if self.rules.distinct else 0]
        self.earlier = [chunks.code.index_select(0, table) for chunks in known]
        free = self.rules.ranked or self.rules.across
        self.code = None if free else self.chunks.code.index_select(0, table)

    def pairs(self) -> Iterator[Pairs]:
        """All pairs of chunks, some at a time, every chunk with itself first."""
        for block in self.chunks.blocks:
            for some in block.split(max(1, PAIRS // block.width**2)):
                yield Pairs(some, some, same=True)
        for queries, keys in self.chunks.runs:
            step = max(1, PAIRS // (queries.width * keys.width))
            for some, before in zip(queries.split(step), keys.split(step), strict=True):
                yield Pairs(some, before, same=False)

    def scores(self, pairs: Pairs) -> Tensor:
        """``s_ij`` (p, a, b) in log2."""
        q, k = pairs.queries.of(self.k), pairs.keys.of(self.k)
        scores = self.lanes.workspace("scores", len(q), q.shape[1], k.shape[1])
        return torch.bmm(q, k.mT, out=scores).mul_(pairs.queries.of(self.factor))

    def weights(self, pairs: Pairs) -> Tensor:
        """``exp(s_ij - log_scale_i)`` (p, a, b) of the pairs that count in this round, else 0."""
        scores = self.scores(pairs)
        if self.log_scale is not None:  # what does not count may be larger than the largest that does
            scores.sub_(pairs.queries.of(self.log_scale)).clamp_(max=IN_RANGE + 1)
        return self.prune(scores.exp2_(), pairs)

    def prune(self, weights: Tensor, pairs: Pairs) -> Tensor:
        """Zero in place what does not count: a key that is the query, later, empty, or reached in an earlier round."""
        if pairs.same:
            width = pairs.queries.width
            weights.mul_(self.lanes.visible[:width, :width]).mul_(pairs.keys.of(self.chunks.valid)[:, None, :])
        nearest = None
        for code in self.earlier:
            distance = _distance(code, pairs)
            nearest = distance if nearest is None else torch.minimum(nearest, distance, out=nearest)
        if nearest is not None:
            weights.mul_(nearest.ne_(1).to(weights.dtype))
        if self.code is not None:
            weights.mul_(_distance(self.code, pairs).eq_(1).to(weights.dtype))
        return weights


def accumulate(slots: Tensor, chunks: Block, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add ``a b`` to the slots of some chunks; the ``first`` product, of chunks with themselves, is written."""
    sums = chunks.of(slots)
    torch.baddbmm(sums, a, b, beta=0.0 if first else 1.0, out=sums)


def _distance(code: Tensor, pairs: Pairs) -> Tensor:
    """(p, a, b) ``|2 code_i - 1 - 2 code_j|``: 1 where i reaches j, else more."""
    return (pairs.queries.of(code)[..., None] - 1 - pairs.keys.of(code)[..., None, :]).abs_()
