"""Attention among hashed tokens: the plain differentiable form, and one in cache with a written-out gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.opaque import opaque
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.lsh.hash_blocks import LOG2E, Lanes, Pairs, Round, put
from fast_attention.mechanisms.lsh.hash_chunks import Order, ordered
from fast_attention.mechanisms.lsh.hashing import Codes, Rules, Tokens, hashed_softmax

TOKENS = 8192  # lanes (batch times heads) are taken together up to so many tokens, and two at least, for two threads


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
    if q.device.type != "cpu":
        dispatch.record("banded products over sorted tokens", "one call for all of a round", chunk=size)
        return hashed_softmax(q, v, bucket, rules=rules)
    dispatch.record(
        "chunks of hashed tokens, gathered once a round",
        "on a CPU, where they stay in cache",
        chunk=size,
        rounds=bucket.shape[-2],
    )
    return _HASHED(q, v, bucket, rules=rules)


def forward(q: Tensor, v: Tensor, bucket: Tensor, *, keep: bool, rules: Rules) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs (..., L, Ev), and per token the sum of weights and what was taken off the scores, in log2."""
    rows, values, buckets, scratch = _lanes(q), _lanes(v), _lanes(bucket), Workspace(q)
    out = values.new_empty(values.shape)
    total, shift = values.new_empty(2, *values.shape[:-1])
    for now, order in _sets(rows, buckets, rules):
        content = values[now].flatten(0, 1)
        lanes = Lanes(rows[now].flatten(0, 1), [content], order, rules, scratch)
        sums, norms, top = lanes.room("sums", v.shape[-1]), lanes.room("norms"), lanes.tops()
        numerator, denominator = out[now].flatten(0, 1), total[now].flatten()
        for r in range(len(lanes.rounds)):
            here = Round(lanes, r, top)
            for pairs in here.pairs():
                weights = here.weights(pairs)
                put(sums, pairs.mine, weights, pairs.theirs.of(here.rest[0]), own=pairs.own)
                if pairs.own:
                    torch.sum(weights, -1, out=pairs.mine.of(norms))
                else:
                    pairs.mine.of(norms).add_(weights.sum(-1))
            lanes.collect(numerator, sums, r)
            lanes.collect(denominator, norms, r)
        numerator.div_(denominator[:, None])
        alone = (denominator == 0).nonzero().squeeze(-1)
        numerator.index_copy_(0, alone, content.index_select(0, alone))
        shift[now] = 0.0 if top is None else top.view_as(shift[now])
    return out.view(v.shape), (total, shift) if keep else ()


def backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, rules: Rules
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    """Gradients of q and v, from weights made again."""
    (q, v, bucket), (total, shift) = inputs, kept
    rows, values, buckets, outs, given = (_lanes(x) for x in (q, v, bucket, outputs[0], gradients[0]))
    dq, dv, scratch = rows.new_empty(rows.shape), values.new_empty(values.shape), Workspace(q)
    for now, order in _sets(rows, buckets, rules):
        content = [x[now].flatten(0, 1) for x in (values, given)]
        lanes = Lanes(rows[now].flatten(0, 1), content, order, rules, scratch)
        found = (dq[now].flatten(0, 1), dv[now].flatten(0, 1))
        _set_backward(lanes, outs[now].flatten(0, 1), total[now].reshape(-1, 1), shift[now].flatten(), found)
    return dq.view(q.shape), dv.view(v.shape), None


def _set_backward(lanes: Lanes, out: Tensor, total: Tensor, shift: Tensor, found: tuple[Tensor, Tensor]) -> None:
    """Writes the gradients ``found`` of q and v.

    With ``u_i`` the length of q_i times the scale, ``S_ij = u_i dP_ij`` serves both sides of the product of keys:
    that of q_i is ``(a_i + b_i - (b_i . k_i) k_i) / |q_i|`` where ``a_i = sum_j S_ij k_j``, ``b_j = sum_i S_ij k_i``.
    """
    alone, (dq, dv) = total == 0, found
    per = lanes.rows.split(lanes.widths, -1)[2]
    straight = per * alone  # where nothing was reached, the output is v
    per.div_(total.masked_fill(alone, float("inf")))
    delta, top = (per * out).sum(-1), shift if bool(shift.any()) else None
    dk = lanes.scratch("dk", *dq.shape)
    rooms = [lanes.room(name, x.shape[-1]) for name, x in (("q", dq), ("k", dk), ("v", dv))]
    for r in range(len(lanes.rounds)):
        here = Round(lanes, r, top)
        k, (v, g), valid = here.k, here.rest, here.chunks.valid[..., None]
        g.mul_(valid)
        lost, unit = delta.take(here.chunks.table)[..., None].mul_(valid), here.steep / LOG2E
        for mine, theirs, own in here.pairs():
            weights = here.weights(Pairs(mine, theirs, own))
            put(rooms[2], theirs, weights.mT, mine.of(g), own=own)
            inner = torch.bmm(mine.of(g), theirs.of(v).mT, out=lanes.scratch("inner", *weights.shape))
            inner.sub_(mine.of(lost)).mul_(weights).mul_(mine.of(unit))
            put(rooms[0], mine, inner, theirs.of(k), own=own)
            put(rooms[1], theirs, inner.mT, mine.of(k), own=own)
        for sums, slots in zip((dq, dk, dv), rooms, strict=True):
            lanes.collect(sums, slots, r)
    along = (dk * lanes.k).sum(-1, keepdim=True).masked_fill_(lanes.short, 0.0)
    dq.add_(dk).addcmul_(along, lanes.k, value=-1.0).div_(lanes.length)
    dv.add_(straight)


def _lanes(x: Tensor) -> Tensor:
    """(*lanes, L, X) -> (lanes, L, X)."""
    return x.reshape(-1, *x.shape[-2:])


def _sets(x: Tensor, bucket: Tensor, rules: Rules) -> Iterator[tuple[slice, Order]]:
    """Lanes of ``x`` (lanes, L, X) that are worked on together, and their order by bucket."""
    number, length = x.shape[:2]
    step = max(2, TOKENS // max(length, 1))
    orders = ordered(bucket, number=rules.number, together=step)
    return ((slice(a, a + step), order) for a, order in zip(range(0, number, step), orders, strict=True))


_HASHED = CustomGradient(hashed_softmax, forward, backward)
