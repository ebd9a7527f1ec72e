"""Attention among hashed tokens chunk by chunk: gathered once a round into slots, in cache.

Two kinds of pairs of chunks meet in every round: every chunk with itself, and with the one before it. Slots are laid
out so that both are slices of one table (``hash_chunks.cut``): no product gathers or copies anything. Since keys have
length 1, ``|s_ij| <= scale |q_i|``: weights are plain exponentials without a maximum taken off wherever that is below
``TAME``, so rounds are added up as they are. For the queries beyond it the largest score is found first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.lsh.hash_chunks import Block, Order, cut
from fast_attention.mechanisms.lsh.hashing import SHORTEST, Rules

TAME = 32.0  # scores up to this need no maximum: exp(-2 TAME) is far above the smallest float32
PAIRS = 1 << 19  # query-key pairs that are worked on at once: a megabyte for each of two cores
FAR = 1e30
LOG2E = math.log2(math.e)  # exp2 takes half the time of exp, and the factor joins another


class Pairs(NamedTuple):
    """Some pairs of chunks: which of the round's chunks are the queries' and which the keys'."""

    mine: Block
    theirs: Block
    own: bool  # a chunk with itself


class Lanes:
    """Some lanes' tokens, laid end to end, and the chunks of every round."""

    def __init__(self, q: Tensor, others: list[Tensor], order: Order, rules: Rules, scratch: Workspace) -> None:
        """``q`` (T, E) and what is gathered beside the keys (T, X)."""
        self.rules, self.scratch = rules, scratch
        length = q.norm(dim=-1, keepdim=True)
        self.short, self.length = length < SHORTEST, length.clamp_(min=SHORTEST)  # a short one is not made longer
        self.widths = [x.shape[-1] for x in (q, *others)]
        self.rows = scratch("rows", len(q), sum(self.widths))
        self.k, *rest = self.rows.split(self.widths, -1)
        torch.div(q, self.length, out=self.k)
        for room, x in zip(rest, others, strict=True):
            room.copy_(x)
        self.steep = self.length * (rules.scale * LOG2E)
        self.rounds = cut(order, size=rules.size, ranked=rules.ranked, across=rules.across, dtype=q.dtype)
        ones = torch.ones(rules.size, rules.size, dtype=q.dtype, device=q.device)
        self.others = ones.tril_(-1) if rules.is_causal else ones.fill_diagonal_(0.0)

    def tops(self) -> Tensor | None:
        """Per token the largest score that counts in log2 where scores may pass ``TAME``, else 0; None if none may."""
        wild = (self.steep.abs() > TAME * LOG2E)[:, 0]
        if not bool(wild.any()):
            return None
        top = torch.full_like(wild, -FAR, dtype=self.rows.dtype)
        for r, chunks in enumerate(self.rounds):
            found = top.new_full((chunks.most + 1,), -FAR)
            now = Round(self, r, None)
            for pairs in now.pairs():
                scores = now.scores(pairs)
                counts = now.prune(torch.ones_like(scores), pairs)
                best = scores.add_(counts.sub_(1.0).mul_(FAR)).amax(-1)
                mine = pairs.mine.of(found)
                torch.maximum(mine, best, out=mine)
            top = torch.maximum(top, found.take(chunks.back))
        return top.masked_fill(~wild | (top <= -FAR / 2), 0.0)

    def room(self, name: str, *shape: int) -> Tensor:
        """Slots for any of the rounds, and one of zeros more."""
        room = self.scratch(name, self.rounds[0].most + 1, *shape)
        room[-1] = 0.0
        return room

    def collect(self, sums: Tensor, slots: Tensor, r: int) -> None:
        """Add the slots (n, ...) of a round to the tokens' ``sums`` (T, ...), or begin; masked ones get zeros."""
        where = sums if r == 0 else self.scratch("spare", *sums.shape)
        torch.index_select(slots, 0, self.rounds[r].back, out=where)
        if r:
            sums.add_(where)


class Round:
    """The chunks of one round with their rows gathered."""

    def __init__(self, lanes: Lanes, r: int, shift: Tensor | None) -> None:
        """``shift`` (T,) is taken off the scores."""
        self.lanes, self.rules, self.chunks = lanes, lanes.rules, lanes.rounds[r]
        table = self.chunks.table
        rows = torch.index_select(lanes.rows, 0, table, out=lanes.scratch("slots", len(table), lanes.rows.shape[-1]))
        self.k, *self.rest = rows.split(lanes.widths, -1)
        self.steep = lanes.steep.take(table)[..., None]
        self.shift = None if shift is None else shift.take(table)[..., None]
        known = lanes.rounds[: r if self.rules.distinct else 0]
        self.earlier = [chunks.code.index_select(0, table) for chunks in known]
        free = self.rules.ranked or self.rules.across
        self.code = None if free else self.chunks.code.index_select(0, table)

    def pairs(self) -> Iterator[Pairs]:
        """All pairs of chunks, some at a time, every chunk with itself first."""
        for block in self.chunks.blocks:
            for both in block.parts(max(1, PAIRS // block.width**2)):
                yield Pairs(both, both, own=True)
        for mine, theirs in self.chunks.runs:
            step = max(1, PAIRS // (mine.width * theirs.width))
            for some, before in zip(mine.parts(step), theirs.parts(step), strict=True):
                yield Pairs(some, before, own=False)

    def scores(self, pairs: Pairs) -> Tensor:
        """``s_ij`` (p, a, b) in log2."""
        k, others = pairs.mine.of(self.k), pairs.theirs.of(self.k)
        scores = self.lanes.scratch("scores", len(k), k.shape[1], others.shape[1])
        return torch.bmm(k, others.mT, out=scores).mul_(pairs.mine.of(self.steep))

    def weights(self, pairs: Pairs) -> Tensor:
        """``exp(s_ij - shift_i)`` (p, a, b) of the pairs that count in this round, else 0."""
        scores = self.scores(pairs)
        if self.shift is not None:  # what does not count may be larger than the largest that does
            scores.sub_(pairs.mine.of(self.shift)).clamp_(max=TAME + 1)
        return self.prune(scores.exp2_(), pairs)

    def prune(self, weights: Tensor, pairs: Pairs) -> Tensor:
        """Zeros, in place, where a key does not count: itself, later, in an empty slot, or met in an earlier round."""
        if pairs.own:
            width = pairs.mine.width
            weights.mul_(self.lanes.others[:width, :width]).mul_(pairs.theirs.of(self.chunks.valid)[:, None, :])
        near = None
        for code in self.earlier:
            apart = _apart(code, pairs)
            near = apart if near is None else torch.minimum(near, apart, out=near)
        if near is not None:
            weights.mul_(near.ne_(1).to(weights.dtype))
        if self.code is not None:
            weights.mul_(_apart(self.code, pairs).eq_(1).to(weights.dtype))
        return weights


def put(room: Tensor, where: Block, a: Tensor, b: Tensor, *, own: bool) -> None:
    """Write ``a b`` of chunks with themselves, add that of neighbours."""
    now = where.of(room)
    torch.baddbmm(now, a, b, beta=0.0 if own else 1.0, out=now)


def _apart(code: Tensor, pairs: Pairs) -> Tensor:
    """(p, a, b) ``|2 code_i - 1 - 2 code_j|``: 1 where i reaches j, else more."""
    return (pairs.mine.of(code)[..., None] - 1 - pairs.theirs.of(code)[..., None, :]).abs_()
