"""Computes the weights of one round of hashing: its tokens gathered into slots, chunk by chunk, in cache.

Two kinds of pairs of chunks meet in every round: every chunk with itself, and with the one before it. Slots are laid
out so that both are slices of one table (``layout.lay_out``): no product gathers or copies anything. Since keys have
length 1, ``|s_ij| <= scale |q_i|``: weights are plain exponentials without a maximum taken off wherever that is at most
``IN_RANGE``, so rounds are added up as they are. For the queries beyond it the largest score is found first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.lsh.reference import SHORTEST, Rules

IN_RANGE = 32.0  # scores up to this need no maximum: exp(-2 IN_RANGE) is far above the smallest float32
PAIRS = 1 << 19  # query-key pairs that are worked on at once: a megabyte for each of two cores
FAR = 1e30
LOG2E = math.log2(math.e)  # exp2 takes half the time of exp, and the factor joins another


PARTS = 2  # of a chunk: the last one of a group is as wide as needed, in whole parts; more parts, smaller products
SMALL = 2**14  # codes below this are compared, doubled, as int16


class Block(NamedTuple):
    """Chunks of one width, one after the other."""

    start: int  # first slot
    width: int
    number: int

    def of(self, x: Tensor) -> Tensor:
        """The rows of ``x`` (slots, ...) as (number, width, ...): a view."""
        return x[self.start : self.start + self.width * self.number].view(self.number, self.width, *x.shape[1:])

    def split(self, most: int) -> Iterator[Block]:
        """At most so many of the chunks at a time."""
        for a in range(0, self.number, most):
            yield Block(self.start + a * self.width, self.width, min(most, self.number - a))


class Chunks(NamedTuple):
    """One round of hashing of T tokens: n slots in chunks, each of one group of tokens (a bucket, or a whole lane)."""

    table: Tensor  # (n,): the token in every slot; empty slots repeat the last before them in their chunk
    valid: Tensor  # (n,): 1 where a slot holds a token of its own, else 0
    blocks: list[Block]  # all chunks
    runs: list[tuple[Block, Block]]  # chunks, and those before them in their groups
    back: Tensor  # (T,): the slot of every token; ``most`` where it is masked
    code: Tensor  # (T,): twice a number; i reaches j where the numbers differ by 0 or 1
    most: int  # slots of any round


class Order(NamedTuple):
    """Tokens of all rounds and lanes by bucket, then by position; a row of wide = buckets + 1 is a lane in a round."""

    bucket: Tensor  # (rounds T,): row * wide + bucket, rows round by round, ascending
    token: Tensor  # (rounds T,): the token that has this bucket
    lanes: int
    rounds: int
    wide: int


@torch.no_grad()
def sort_by_bucket(bucket: Int[Tensor, "lanes rounds length"], *, number: int, together: int) -> list[Order]:
    """The order of every ``together`` lanes, tokens numbered through them; one sort for all, which is fastest."""
    _, rounds, length = bucket.shape
    wide, groups = number + 1, bucket.split(together)
    rows = torch.arange(len(bucket) * rounds, device=bucket.device, dtype=torch.int32)[:, None]
    flat = torch.cat([lanes.transpose(0, 1).reshape(-1, length) for lanes in groups])
    buckets, tokens = (flat.int() + wide * rows).flatten().sort(stable=True)
    orders, at = [], 0
    for lanes in groups:
        end = at + lanes.numel()
        before = torch.arange(at, end, length * len(lanes), device=bucket.device)[:, None]
        token = (tokens[at:end].view(rounds, -1) - before).flatten()
        orders.append(Order(buckets[at:end] - at // length * wide, token, len(lanes), rounds, wide))
        at = end
    return orders


@torch.no_grad()
def lay_out(order: Order, *, size: int, ranked: bool, across: bool, dtype: torch.dtype) -> list[Chunks]:
    """The chunks of every round.

    No chunk holds tokens of two lanes, nor, if ``ranked``, of two buckets; see ``reference.arrange``. Masked tokens are
    in none. Time and memory O(rounds T).
    """
    flat, wide, rounds = order.bucket.view(order.rounds, -1), order.wide, order.rounds
    full = torch.bincount(order.bucket, minlength=rounds * order.lanes * wide).view(rounds, -1, wide)
    real = full[..., :-1]
    ends = full.flatten().cumsum(0).view_as(full)
    base = torch.arange(rounds, device=flat.device)[:, None] * (order.lanes * wide)
    bucket = flat - base
    masked = bucket % wide == wide - 1
    if ranked:
        starts, counts, group = (ends - full).flatten(1), F.pad(real, (0, 1)).flatten(1), bucket
    else:
        starts, counts = ends[..., -1] - full.sum(-1), real.sum(-1)
        group = torch.div(bucket, wide, rounding_mode="floor")
    group = group.long()
    rank = torch.arange(flat.numel(), device=flat.device).view_as(flat) - starts.gather(-1, group)
    index = torch.div(rank, size, rounding_mode="floor")  # of the token's chunk in its group
    code = _codes(index, bucket, group, (counts + size - 1) // size, order, size=size, across=across)
    layouts = [_layout(*each, size=size) for each in zip(index, group, counts, strict=True)]
    most = max(layout.slots for layout in layouts)
    slot = torch.stack([layout.base for layout in layouts]).add_(rank % size).masked_fill_(masked, most)
    token = order.token.view_as(flat)
    back, codes = (torch.empty_like(x).scatter_(1, token, x) for x in (slot, code))
    table = token.new_zeros(rounds, most + 1).scatter_(1, slot, token)[:, :-1]
    valid = slot.new_zeros(rounds, most + 1, dtype=dtype).scatter_(1, slot, 1.0)[:, :-1]
    table = table.gather(1, torch.where(valid > 0, torch.arange(most, device=slot.device), 0).cummax(1).values)
    return [
        Chunks(table[r, : each.slots], valid[r, : each.slots], each.blocks, each.runs, back[r], codes[r], most)
        for r, each in enumerate(layouts)
    ]


class Layout(NamedTuple):
    """The slots of a round's chunks."""

    base: Tensor  # (T,): the first slot of every sorted token's chunk
    slots: int
    blocks: list[Block]
    runs: list[tuple[Block, Block]]


def _layout(index: Tensor, group: Tensor, counts: Tensor, *, size: int) -> Layout:
    """The chunks of groups of so many tokens (G,), such that chunks in a row have those before them in a row as well.

    The first chunks of all groups come first, the longest group leading, then all second ones, and so on; then the
    last chunks of the groups that fill a part of one only: these are narrow, of whole parts.
    """
    parts = min(PARTS, size)
    width_of_part, (ordered, order) = size // parts, counts.sort(descending=True, stable=True)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    full = (ordered + size - (parts - 1) * width_of_part - 1) // size  # chunks of full width
    part = ((ordered - full * size).clamp_(min=0) + width_of_part - 1) // width_of_part
    kinds, numbers = torch.unique_consecutive(full * parts + part, return_counts=True)
    alike = [(kind // parts, kind % parts, n) for kind, n in zip(kinds.tolist(), numbers.tolist(), strict=True)]
    deepest = alike[0][0] if alike else 0
    if deepest > 1 + sum(n for full_chunks, _, n in alike if full_chunks > 1):
        return _few_long(index, group, (counts + size - 1) // size, size=size)
    wide = [sum(n for full_chunks, _, n in alike if full_chunks > at) for at in range(deepest)]
    first = [0, *itertools.accumulate(wide)]
    blocks = [Block(0, size, first[-1])]
    runs = [
        (Block(b * size, size, n), Block(a * size, size, n))
        for a, b, n in zip(first, first[1:], wide[1:], strict=False)
    ]
    at, remainders, ends = first[-1] * size, [0] * len(alike), [0, *itertools.accumulate(n for _, _, n in alike)]
    for width in range((parts - 1) * width_of_part, 0, -width_of_part):
        begin = at
        for g, (full_chunks, parts_of_last, n) in enumerate(alike):
            if parts_of_last * width_of_part == width:
                remainders[g] = at - ends[g] * width
                if full_chunks:
                    before = (first[full_chunks - 1] + ends[g]) * size
                    runs.append((Block(at, width, n), Block(before, size, n)))
                at += n * width
        blocks.append(Block(begin, width, (at - begin) // width))
    offsets = torch.arange(len(position), device=part.device) * (part * width_of_part)
    remainder = part.new_tensor(remainders).repeat_interleave(numbers) + offsets
    row = position.index_select(0, group)
    base_if_full = (part.new_tensor(first).index_select(0, index.clamp(max=deepest)) + row) * size
    base = torch.where(index < full.index_select(0, row), base_if_full, remainder.index_select(0, row))
    return Layout(base, at, blocks, runs)


def _few_long(index: Tensor, group: Tensor, numbers: Tensor, *, size: int) -> Layout:
    """The chunks of few long groups, so many each: one after the other, so that the runs are few."""
    first, total = numbers.cumsum(0) - numbers, int(numbers.sum())
    runs = [
        (Block((a + 1) * size, size, n - 1), Block(a * size, size, n - 1))
        for a, n in zip(first.tolist(), numbers.tolist(), strict=True)
    ]
    return Layout((first.index_select(0, group) + index) * size, total * size, [Block(0, size, total)], runs)


def _codes(
    index: Tensor, bucket: Tensor, group: Tensor, numbers: Tensor, order: Order, *, size: int, across: bool
) -> Tensor:
    """Twice the number of every sorted token's chunk in its lane, buckets two apart unless they reach ``across``."""
    lanes = numbers.unflatten(-1, (order.lanes, -1))
    chunk = (lanes.cumsum(-1) - lanes).flatten(1).gather(-1, group) + index
    if not across:
        chunk = chunk + 2 * (bucket % order.wide)
    largest = -(-index.shape[-1] // (size * order.lanes)) + 4 * order.wide
    return (2 * chunk).to(torch.int16 if largest < SMALL else torch.int32)


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
