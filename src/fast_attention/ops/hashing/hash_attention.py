"""Attention among hashed tokens: the plain differentiable form, and one in cache with a written-out gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fast_attention.ops.explicit import Explicit
from fast_attention.ops.hashing.hash_blocks import Lanes, put, taken
from fast_attention.ops.hashing.hash_chunks import Order, ordered
from fast_attention.ops.hashing.hashing import Codes, Rules, Tokens, hashed_softmax
from fast_attention.ops.trail import took

TOKENS = 4096  # lanes (batch times heads) are taken together up to so many tokens


def hashed_attention(q: Tokens, v: Tokens, bucket: Codes, rules: Rules) -> Tokens:
    """Softmax over the union of what every token reaches by its buckets (..., H, rounds, L); ``v`` where that is empty.

    Bucket ``rules.number`` holds what is masked: it neither is seen nor gets an output that means anything.
    """
    if q.device.type != "cpu":
        took("banded products over sorted tokens", "one call for all of a round", chunk=rules.size)
        return hashed_softmax(q, v, bucket, rules=rules)
    took("chunks of hashed tokens, gathered in cache", "on a CPU", chunk=rules.size, rounds=bucket.shape[-2])
    return _HASHED(q, v, bucket, rules=rules)


def forward(q: Tensor, v: Tensor, bucket: Tensor, *, keep: bool, rules: Rules) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs (..., L, Ev), and per token the sum of weights and what was taken off the scores."""
    rows, values, buckets = _lanes(q), _lanes(v), _lanes(bucket)
    out = values.new_empty(values.shape)
    total, shift = values.new_empty(2, *values.shape[:-1])
    for now, order in _sets(rows, buckets, rules):
        lanes = Lanes(rows[now], order, rules)
        top, content = lanes.tops(), values[now].flatten(0, 1)
        numerator, denominator = torch.zeros_like(content), content.new_zeros(len(content))
        sums, norms = lanes.room(v.shape[-1]), lanes.room()
        spares = torch.empty_like(numerator), torch.empty_like(denominator)
        for r in range(len(lanes.rounds)):
            for pairs in lanes.pairs(r):
                weights = lanes.weights(r, pairs, top)
                put(sums, pairs.mine, weights, taken(content, pairs.keys))
                if isinstance(pairs.mine, slice):
                    torch.sum(weights, -1, out=norms[pairs.mine])
                else:
                    norms.index_add_(0, pairs.mine, weights.sum(-1))
            lanes.collect(numerator, sums, r, spares[0])
            lanes.collect(denominator, norms, r, spares[1])
        denominator = denominator[:, None]
        alone = denominator == 0
        out[now] = torch.where(alone, content, numerator.div_(denominator)).view_as(out[now])
        total[now], shift[now] = denominator.view_as(total[now]), 0.0 if top is None else top.view_as(total[now])
    return out.view(v.shape), (total, shift) if keep else ()


def backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, rules: Rules
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """Gradients of q and v, from weights made again."""
    (q, v, bucket), (total, shift) = inputs, kept
    rows, values, buckets, outs, given = (_lanes(x) for x in (q, v, bucket, outputs[0], gradients[0]))
    dq, dv = rows.new_empty(rows.shape), values.new_empty(values.shape)
    for now, order in _sets(rows, buckets, rules):
        lanes = Lanes(rows[now], order, rules)
        found = _set_backward(lanes, values[now], outs[now], given[now], total[now], shift[now])
        dq[now], dv[now] = (x.view_as(y[now]) for x, y in zip(found, (dq, dv), strict=True))
    return dq.view(q.shape), dv.view(v.shape), None


def _set_backward(
    lanes: Lanes, v: Tensor, out: Tensor, given: Tensor, total: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    v, out, given, total = v.flatten(0, 1), out.flatten(0, 1), given.flatten(0, 1), total.reshape(-1, 1)
    alone = total == 0
    per = (given / total).masked_fill_(alone, 0.0)
    delta = (per * out).sum(-1)
    top = shift.flatten() if bool(shift.any()) else None
    dv = given.masked_fill(~alone, 0.0)
    dq, dk = torch.zeros_like(lanes.q), torch.zeros_like(lanes.q)
    rooms, spares = [lanes.room(x.shape[-1]) for x in (dq, dk, dv)], [torch.empty_like(x) for x in (dq, dv)]
    for r, chunks in enumerate(lanes.rounds):
        for pairs in lanes.pairs(r):
            weights = lanes.weights(r, pairs, top).mul_(chunks.valid[pairs.mine][..., None])
            g = taken(per, pairs.queries)
            put(rooms[2], pairs.theirs, weights.mT, g)
            inner = torch.bmm(g, taken(v, pairs.keys).mT).sub_(delta.take(pairs.queries)[..., None]).mul_(weights)
            put(rooms[0], pairs.mine, inner, taken(lanes.k, pairs.keys))
            put(rooms[1], pairs.theirs, inner.mT, taken(lanes.q, pairs.queries))
        for sums, slots, spare in zip((dq, dk, dv), rooms, (spares[0], *spares), strict=True):
            lanes.collect(sums, slots, r, spare)
    along = (dk * lanes.k).sum(-1, keepdim=True).masked_fill_(lanes.short, 0.0)
    return dq.mul_(lanes.rules.scale).add_(dk.sub_(along * lanes.k).div_(lanes.length)), dv


def _lanes(x: Tensor) -> Tensor:
    """(*lanes, L, X) -> (lanes, L, X)."""
    return x.reshape(-1, *x.shape[-2:])


def _sets(x: Tensor, bucket: Tensor, rules: Rules) -> Iterator[tuple[slice, Order]]:
    """Lanes of ``x`` (lanes, L, X) that are worked on together, and their order by bucket."""
    number, length = x.shape[:2]
    step = max(1, TOKENS // max(length, 1))
    orders = ordered(bucket, number=rules.number, together=step)
    return ((slice(a, a + step), order) for a, order in zip(range(0, number, step), orders, strict=True))


_HASHED = Explicit(hashed_softmax, forward, backward)
