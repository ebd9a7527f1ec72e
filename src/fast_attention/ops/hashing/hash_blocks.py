"""Attention among hashed tokens chunk by chunk: gathered into slots, in cache, with a written-out gradient.

Two lists of pairs of chunks meet in every round: every chunk with itself, and with the one before it. Since keys have
length 1, ``|s_ij| <= scale |q_i|``: weights are plain exponentials without a maximum taken off wherever that is below
``TAME``, so rounds are added up as they are. For the queries beyond it the largest score is found first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention.ops.exponential import exp_
from fast_attention.ops.hashing.hash_chunks import Chunks, Order, cut
from fast_attention.ops.hashing.hashing import SHORTEST, Rules

TAME = 32.0  # scores up to this need no maximum: exp(-2 TAME) is far above the smallest float32
PAIRS = 1 << 17  # query-key pairs that are worked on at once: half a megabyte
FAR = 1e30


class Pairs(NamedTuple):
    """Some pairs of chunks: of the queries' chunks and the keys' chunks their numbers, tokens and taken slots."""

    mine: Tensor | slice
    theirs: Tensor | slice
    queries: Tensor  # (p, size)
    keys: Tensor  # (p, size)
    own: bool  # a chunk with itself


class Lanes:
    """Some lanes' tokens, laid end to end, and the chunks of every round."""

    def __init__(self, q: Tensor, order: Order, rules: Rules) -> None:
        """``q`` (lanes, L, E)."""
        self.rules, raw = rules, q.reshape(-1, q.shape[-1])
        length = raw.norm(dim=-1, keepdim=True)
        self.short, self.length = length < SHORTEST, length.clamp(min=SHORTEST)  # a short one is not made longer
        self.k, self.q = raw / self.length, raw if rules.scale == 1.0 else raw * rules.scale
        self.rounds = cut(order, size=rules.size, ranked=rules.ranked, across=rules.across, dtype=q.dtype)
        ones = torch.ones(rules.size, rules.size, dtype=q.dtype, device=q.device)
        self.others = ones.tril(-1) if rules.is_causal else ones.fill_diagonal_(0.0)

    def pairs(self, r: int) -> Iterator[Pairs]:
        """All pairs of chunks of a round, some at a time, every chunk with itself first."""
        chunks, step = self.rounds[r], max(1, PAIRS // self.rules.size**2)
        for a in range(0, len(chunks.table), step):
            tokens = chunks.table[a : a + step]
            yield Pairs(slice(a, a + len(tokens)), slice(a, a + len(tokens)), tokens, tokens, own=True)
        for mine in chunks.later.split(step):
            theirs = mine - 1
            yield Pairs(mine, theirs, chunks.table[mine], chunks.table[theirs], own=False)

    def weights(self, r: int, pairs: Pairs, shift: Tensor | None) -> Tensor:
        """``exp(s_ij - shift_i)`` (p, size, size) of the pairs that count in this round, else 0."""
        scores = torch.bmm(taken(self.q, pairs.queries), taken(self.k, pairs.keys).mT)
        if shift is not None:  # what does not count may be larger than the largest that does
            scores.sub_(shift.take(pairs.queries)[..., None]).clamp_(max=TAME + 1)
        return self.prune(exp_(scores), r, pairs)

    def prune(self, weights: Tensor, r: int, pairs: Pairs) -> Tensor:
        """Zeros, in place, where a key does not count: itself, later, in an empty slot, or met in an earlier round."""
        rules, chunks = self.rules, self.rounds[r]
        if pairs.own:
            weights.mul_(self.others).mul_(chunks.valid[pairs.theirs][:, None, :])
        near = None
        for earlier in self.rounds[: r if rules.distinct else 0]:
            apart = _apart(earlier, pairs)
            near = apart if near is None else torch.minimum(near, apart, out=near)
        if near is not None:
            weights.mul_(near.ne_(1).to(weights.dtype))
        if not (rules.ranked or rules.across):
            weights.mul_(_apart(chunks, pairs).eq_(1).to(weights.dtype))
        return weights

    def tops(self) -> Tensor | None:
        """Per token the largest score that counts where scores may pass ``TAME``, else 0; None where none may."""
        steep = (self.length * abs(self.rules.scale) > TAME)[:, 0]
        if not bool(steep.any()):
            return None
        top = torch.full_like(steep, -FAR, dtype=self.q.dtype)
        for r, chunks in enumerate(self.rounds):
            found = top.new_full((len(chunks.table) + 1, self.rules.size), -FAR)
            for pairs in self.pairs(r):
                scores = torch.bmm(taken(self.q, pairs.queries), taken(self.k, pairs.keys).mT)
                counts = self.prune(torch.ones_like(scores), r, pairs)
                best = scores.add_(counts.sub_(1.0).mul_(FAR)).amax(-1)
                found[pairs.mine] = torch.maximum(found[pairs.mine], best)
            top = torch.maximum(top, found.take(chunks.back))
        return top.masked_fill(~steep | (top <= -FAR / 2), 0.0)

    def room(self, *shape: int) -> Tensor:
        """Slots for any of the rounds."""
        most = max(len(chunks.table) for chunks in self.rounds)
        return self.q.new_empty(most + 1, self.rules.size, *shape)

    def collect(self, sums: Tensor, slots: Tensor, r: int, spare: Tensor) -> None:
        """Add the slots (n, size, ...) of a round to the tokens' ``sums`` (T, ...); masked tokens get zeros."""
        chunks = self.rounds[r]
        slots[len(chunks.table)] = 0.0
        sums.add_(torch.index_select(slots.flatten(0, 1), 0, chunks.back, out=spare))


def taken(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows of ``x`` (T, E) -> (p, size, E)."""
    return x.index_select(0, tokens.flatten()).view(*tokens.shape, x.shape[-1])


def put(room: Tensor, where: Tensor | slice, a: Tensor, b: Tensor) -> None:
    """Write ``a b`` of chunks with themselves (slices), add that of neighbours. No chunk comes twice in one call."""
    if isinstance(where, slice):
        torch.bmm(a, b, out=room[where])
    else:
        room.index_add_(0, where, torch.bmm(a, b))


def _apart(chunks: Chunks, pairs: Pairs) -> Tensor:
    """(p, size, size) ``|2 code_i - 1 - 2 code_j|``: 1 where i reaches j, else more."""
    mine = chunks.code.index_select(0, pairs.queries.flatten()).view_as(pairs.queries) - 1
    theirs = chunks.code.index_select(0, pairs.keys.flatten()).view_as(pairs.keys)
    return (mine[..., None] - theirs[..., None, :]).abs_()
