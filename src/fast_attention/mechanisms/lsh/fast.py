"""Attends among hashed tokens in chunks that stay in cache, with a hand-written gradient.

Computes the weights of one round of hashing: its tokens gathered into slots, chunk by chunk, in cache.

Two kinds of pairs of chunks meet in every round: every chunk with itself, and with the one before it. Slots are laid
out so that both are slices of one table (``lay_out``): no product gathers or copies anything. Since keys have
length 1, ``|s_ij| <= scale |q_i|``: weights are plain exponentials without a maximum taken off wherever that is at most
``IN_RANGE``, so rounds are added up as they are. For the queries beyond it the largest score is found first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.masks import masked_softmax
from fast_attention.engine.opaque import opaque
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.lsh.reference import SHORTEST, Codes, Rules, Tokens, arrange, hashed_softmax

TOKENS = 8192  # lanes (batch times heads) are taken together up to so many tokens, and two at least, for two threads


SHORT = 256  # tokens up to which sorting them costs more than it saves
PAIRS = 2**24  # of all lanes, beyond which scores would take more than 64 MiB


def serves(q: Tensor) -> bool:
    """Whether all pairs are few enough."""
    return q.shape[-2] <= SHORT and q[..., 0].numel() * q.shape[-2] <= PAIRS


def dense_softmax(q: Tokens, v: Tokens, bucket: Codes, *, rules: Rules) -> Tokens:
    """``reference.hashed_softmax`` over all pairs, in operations that autograd follows."""
    often = meetings(bucket, rules)
    met = often > 0
    scores = (rules.scale * q) @ F.normalize(q, dim=-1, eps=SHORTEST).mT
    if not rules.distinct:
        scores = scores + often.clamp(min=1).to(scores.dtype).log()
    return torch.where(met.any(-1, keepdim=True), masked_softmax(scores, met) @ v, v)


@torch.no_grad()
def meetings(bucket: Codes, rules: Rules) -> Tensor:
    """In how many rounds query i reaches key j (..., L, L); what masked queries reach means nothing."""
    code = arrange(bucket, number=rules.number, size=rules.size, ranked=rules.ranked, across=rules.across).code.short()
    often = sum(((each[..., :, None] - each[..., None, :]) & ~1 == 0).byte() for each in code.unbind(-2))
    assert isinstance(often, Tensor)
    if rules.is_causal:
        return often.tril_(-1)
    often.diagonal(dim1=-2, dim2=-1).zero_()
    return often


@opaque(lambda q, v, *others, **numbers: torch.empty_like(v, memory_format=torch.contiguous_format))
def hashed_attention(
    q: Tokens, v: Tokens, bucket: Codes,
    *, number: int, size: int, ranked: bool, across: bool, is_causal: bool, distinct: bool, scale: float,
) -> Tokens:  # fmt: skip
    """Softmax over the union of what every token reaches by its buckets (..., H, rounds, L); ``v`` where that is empty.

    Bucket ``number`` holds what is masked: it neither is seen nor gets an output that means anything. Numbers as in
    ``Rules``.
    """
    rules = Rules(number, size, ranked, across, is_causal, distinct, scale)
    if why := dispatch.obstacle(q, v):
        dispatch.record("banded products over sorted tokens", why, chunk=size)
        return hashed_softmax(q, v, bucket, rules=rules)
    if serves(q):
        dispatch.record("one product of all tokens, masked by their buckets", f"at most {SHORT} tokens")
        return dense_softmax(q, v, bucket, rules=rules)
    why = "tokens of one bucket stay in cache"
    dispatch.record("chunks of hashed tokens, gathered once a round", why, chunk=size, rounds=bucket.shape[-2])
    return _HASHED(q, v, bucket, rules=rules)


IN_RANGE = 32.0  # scores up to this need no maximum: exp(-2 IN_RANGE) is far above the smallest float32
AT_ONCE = 1 << 19  # query-key pairs that are worked on at once: a megabyte for each of two cores
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
            for some in block.split(max(1, AT_ONCE // block.width**2)):
                yield Pairs(some, some, same=True)
        for queries, keys in self.chunks.runs:
            step = max(1, AT_ONCE // (queries.width * keys.width))
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


def forward(q: Tensor, v: Tensor, bucket: Tensor, *, keep: bool, rules: Rules) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs (..., L, Ev), and per token the sum of weights and their log scale, in log2."""
    (queries, values, buckets), workspace = _flat(q, v, bucket), Workspace(q)
    out = values.new_empty(values.shape)
    total, log_scales = values.new_empty(2, *values.shape[:-1])
    for at, order in _groups(queries, buckets, rules):
        content = values[at].flatten(0, 1)
        lanes = Lanes(queries[at].flatten(0, 1), [content], order, rules, workspace)
        sums, norms, log_scale = lanes.slots("sums", v.shape[-1]), lanes.slots("norms"), lanes.log_scale()
        numerator, denominator = out[at].flatten(0, 1), total[at].flatten()
        for r in range(len(lanes.rounds)):
            this = Round(lanes, r, log_scale)
            for pairs in this.pairs():
                weights = this.weights(pairs)
                accumulate(sums, pairs.queries, weights, pairs.keys.of(this.rest[0]), first=pairs.same)
                if pairs.same:
                    torch.sum(weights, -1, out=pairs.queries.of(norms))
                else:
                    pairs.queries.of(norms).add_(weights.sum(-1))
            lanes.collect(numerator, sums, r)
            lanes.collect(denominator, norms, r)
        numerator.div_(denominator[:, None])
        alone = (denominator == 0).nonzero().squeeze(-1)
        numerator.index_copy_(0, alone, content.index_select(0, alone))
        log_scales[at] = 0.0 if log_scale is None else log_scale.view_as(log_scales[at])
    return out.view(v.shape), (total, log_scales) if keep else ()


def backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, rules: Rules
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """Gradients of q and v, from weights computed again."""
    (q, v, bucket), (total, log_scales) = inputs, kept
    queries, values, buckets, outs, grads = _flat(q, v, bucket, outputs[0], gradients[0])
    dq, dv, workspace = queries.new_empty(queries.shape), values.new_empty(values.shape), Workspace(q)
    for at, order in _groups(queries, buckets, rules):
        content = [x[at].flatten(0, 1) for x in (values, grads)]
        lanes = Lanes(queries[at].flatten(0, 1), content, order, rules, workspace)
        into = (dq[at].flatten(0, 1), dv[at].flatten(0, 1))
        _lanes_backward(lanes, outs[at].flatten(0, 1), total[at].reshape(-1, 1), log_scales[at].flatten(), into)
    return dq.view(q.shape), dv.view(v.shape), None


def _lanes_backward(lanes: Lanes, out: Tensor, total: Tensor, log_scale: Tensor, into: tuple[Tensor, Tensor]) -> None:
    """Write the gradients of q and v ``into`` two tensors.

    With ``u_i`` the length of q_i times the scale, ``S_ij = u_i dP_ij`` serves both sides of the product of keys:
    that of q_i is ``(a_i + b_i - (b_i . k_i) k_i) / |q_i|`` where ``a_i = sum_j S_ij k_j``, ``b_j = sum_i S_ij k_i``.
    """
    alone, (dq, dv) = total == 0, into
    grad = lanes.rows.split(lanes.widths, -1)[2]
    d_alone = grad * alone  # where nothing was reached, the output is v
    grad.div_(total.masked_fill(alone, float("inf")))
    delta, log_scale_or_none = (grad * out).sum(-1), log_scale if bool(log_scale.any()) else None
    dk = lanes.workspace("dk", *dq.shape)
    dq_slots, dk_slots, dv_slots = (lanes.slots(name, x.shape[-1]) for name, x in (("q", dq), ("k", dk), ("v", dv)))
    for r in range(len(lanes.rounds)):
        this = Round(lanes, r, log_scale_or_none)
        k, (v, g), valid = this.k, this.rest, this.chunks.valid[..., None]
        g.mul_(valid)
        mean, factor = delta.take(this.chunks.table)[..., None].mul_(valid), this.factor / LOG2E
        for queries, keys, same in this.pairs():
            weights = this.weights(Pairs(queries, keys, same))
            accumulate(dv_slots, keys, weights.mT, queries.of(g), first=same)
            d_scores = torch.bmm(queries.of(g), keys.of(v).mT, out=lanes.workspace("d_scores", *weights.shape))
            d_scores.sub_(queries.of(mean)).mul_(weights).mul_(queries.of(factor))
            accumulate(dq_slots, queries, d_scores, keys.of(k), first=same)
            accumulate(dk_slots, keys, d_scores.mT, queries.of(k), first=same)
        for sums, slots in ((dq, dq_slots), (dk, dk_slots), (dv, dv_slots)):
            lanes.collect(sums, slots, r)
    along = (dk * lanes.k).sum(-1, keepdim=True).masked_fill_(lanes.short, 0.0)
    dq.add_(dk).addcmul_(along, lanes.k, value=-1.0).div_(lanes.length)
    dv.add_(d_alone)


def _flat(*tensors: Tensor) -> list[Tensor]:
    """(*lanes, L, X) -> (lanes, L, X) each."""
    return [x.reshape(-1, *x.shape[-2:]) for x in tensors]


def _groups(x: Tensor, bucket: Tensor, rules: Rules) -> Iterator[tuple[slice, Order]]:
    """Lanes of ``x`` (lanes, L, X) that are worked on together, and their order by bucket."""
    number, length = x.shape[:2]
    step = max(2, TOKENS // max(length, 1))
    orders = sort_by_bucket(bucket, number=rules.number, together=step)
    return ((slice(a, a + step), order) for a, order in zip(range(0, number, step), orders, strict=True))


_HASHED = CustomGradient(hashed_softmax, forward, backward)
