"""Attends among hashed tokens in chunks that stay in cache, with a hand-written gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.masks import masked_softmax
from fast_attention.engine.opaque import opaque
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.lsh.reference import SHORTEST, Codes, Rules, Tokens, arrange, hashed_softmax
from fast_attention.mechanisms.lsh.rounds import LOG2E, Lanes, Order, Pairs, Round, accumulate, sort_by_bucket

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
