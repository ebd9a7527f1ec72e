"""Spreads ByLength: the strategy of ``long`` for all queries; rows of ``short`` for those that see few keys.

Not causal, a sequence's number of visible keys decides between the two strategies. Causal, the tokens up to ``above``
visible ones go to the processes whose queries see no more; these compute ``short`` of them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fast_attention import checks
from fast_attention.mechanisms.hybrid.by_length import ByLength
from fast_attention.mechanisms.hybrid.by_length_rows import Part
from fast_attention.parallel import collectives
from fast_attention.parallel.fetching import Ranges, fetch, tokens_sent
from fast_attention.parallel.strategy import Call, Sizes, Strategy


def by_length(short: Strategy, long: Strategy) -> Strategy:
    """The strategy of a mechanism by length, from those of its two mechanisms."""

    def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mechanism = _mechanism(call)
        checks.weights(mechanism, call.w, q)
        few, many = _calls(call)
        if call.shards.num_keys <= mechanism.above:
            return short.attend(few, q, k, v)
        if call.is_causal:
            return _early_rows(call, few, q, k, v, long.attend(many, q, k, v))
        if call.key_mask is None:
            return long.attend(many, q, k, v)
        return _by_sequence(call, short, long, q, k, v)

    def sends(call: Call, sizes: Sizes) -> int:
        """Bytes sent where every key is visible; which rows are of ``short`` depends on what a mask holds."""
        mechanism, shards = _mechanism(call), call.shards
        few, many = _calls(call)
        if shards.num_keys <= mechanism.above:
            return short.sends(few, sizes)
        counts = (shards.world - 1) * 8 * sizes.batch * (1 + call.is_causal) if call.masked else 0
        if not call.is_causal:
            return counts + long.sends(many, sizes)
        columns = sizes.width + sizes.values + call.masked + sizes.width * _needs_queries(few)
        tokens = tokens_sent(_unmasked(call), shards)
        return counts + long.sends(many, sizes) + tokens * sizes.batch * sizes.heads * columns * sizes.itemsize

    return Strategy("by length", f"{long.collectives}; the first tokens, for the others", attend, sends)


def _mechanism(call: Call) -> ByLength:
    assert isinstance(call.mechanism, ByLength)
    return call.mechanism


def _calls(call: Call) -> tuple[Call, Call]:
    """The calls of both mechanisms."""
    short, long = call.w or ((), ())
    mechanism = _mechanism(call)
    return call._replace(mechanism=mechanism.short, w=short), call._replace(mechanism=mechanism.long, w=long)


def _needs_queries(few: Call) -> bool:
    """Whether the rows of ``short`` have to be computed from the first on."""
    traits = few.mechanism.traits
    return not traits.cross or traits.bounded


def _by_sequence(call: Call, short: Strategy, long: Strategy, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sequences of few visible keys by the one strategy, the others by the other."""
    shards, batch = call.shards, q.shape[:-3]
    assert call.key_mask is not None
    mask = call.key_mask.expand(*batch, k.shape[-2])
    total = collectives.all_gather(mask.sum(-1), shards.group).sum(0).flatten()
    few = total <= _mechanism(call).above
    pairs = [(strategy, each, rows.nonzero()[:, 0])
             for strategy, each, rows in zip((short, long), _calls(call), (few, ~few), strict=True)]  # fmt: skip
    mask, *tensors = (x.reshape(batch.numel(), *x.shape[len(batch) :]) for x in (mask, q, k, v))
    outs = [
        strategy.attend(each._replace(key_mask=mask[rows]), *(x[rows] for x in tensors))
        for strategy, each, rows in pairs if len(rows)
    ]  # fmt: skip
    order = torch.cat([rows for _, _, rows in pairs]).argsort()
    return torch.cat(outs)[order].unflatten(0, batch) if batch else torch.cat(outs)[0]


def _unmasked(call: Call) -> Ranges:
    """What each process needs where every key is visible: the tokens up to the last of its queries that see few."""
    starts, above = call.shards.starts(), _mechanism(call).above
    return [(0, min(end, above) if start < min(end, above) else 0) for start, end in pairwise(starts)]


def _visible(call: Call, k: Tensor) -> tuple[Tensor, Ranges]:
    """How many keys each of this process's queries sees, (..., S), and what each process needs of all tokens."""
    shards, above = call.shards, _mechanism(call).above
    assert call.key_mask is not None
    mask = call.key_mask.expand(*k.shape[:-3], k.shape[-2])
    sums = collectives.all_gather(mask.sum(-1), shards.group)
    number = sums[: shards.rank].sum(0)[..., None] + mask.cumsum(-1)
    last = (number <= above).sum(-1)
    ends = collectives.all_gather(last, shards.group).flatten(1).amax(-1).tolist()
    return number, [(0, start + end if end else 0) for start, end in zip(shards.starts(), ends, strict=False)]


def _early_rows(call: Call, few: Call, q: Tensor, k: Tensor, v: Tensor, late: Tensor) -> Tensor:
    """``late``, the outputs of ``long``, but for queries that see few keys, which are those of ``short``."""
    shards, above = call.shards, _mechanism(call).above
    if call.key_mask is None:
        number, ranges = (
            torch.arange(shards.start + 1, shards.start + 1 + q.shape[-2], device=q.device),
            _unmasked(call),
        )
    else:
        number, ranges = _visible(call, k)
    k, v, mask = checks.without_masked(k, v, call.key_mask, "kv")
    columns = [k, v] if mask is None else [k, v, mask.expand(*k.shape[:-1])[..., None].to(k.dtype)]
    if _needs_queries(few):
        columns.append(q)
    fetched = fetch(torch.cat(columns, -1), ranges, shards)
    rows = ranges[shards.rank][1] - shards.start
    if rows <= 0:
        return collectives.with_gradient(late, fetched)
    k, v, *others = fetched.split([x.shape[-1] for x in columns], -1)
    visible = None if mask is None else others.pop(0)[..., :1, :, 0].detach() > 0.5
    queries = others[0] if others else q[..., :rows, :]
    early = Part(few.mechanism, few.w)(queries, k, v, is_causal=True, key_mask=visible)[..., -rows:, :]
    takes = (number[..., :rows] <= above)[..., None]
    takes = takes if call.key_mask is None else takes.unsqueeze(-3)
    out = torch.cat([torch.where(takes, early, late[..., :rows, :]), late[..., rows:, :]], -2)
    return collectives.with_gradient(out, fetched)
