"""Causal AFT-simple in blocks: ``sigmoid(q_i) * sum_{j <= i} exp(k_j) v_j / sum_{j <= i} exp(k_j)``, both ways.

A segment of the sequence has one unit, the running maximum at its end, as long as no query of it has seen only keys far
below that: then every denominator is an ordinary number, and plain sums are exact. Any other segment is walked with a
unit per token (``pool.running``). What earlier segments leave behind is one row of sums, kept in float64.

Inside a segment tokens lie in groups of ``GROUP``: row t of all groups is one stretch of memory, and prefix sums are
``GROUP`` - 1 additions of such rows, then the same over the groups' ends by one cumulative sum.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.exponential import exp_
from fast_attention.engine.scan import FLOOR
from fast_attention.mechanisms.aft import pool
from fast_attention.mechanisms.aft.pool import Pool
from fast_attention.mechanisms.aft.pool_passes import block_length, filled
from fast_attention.mechanisms.aft.prefix_short import RANGE, pays, together

GROUP = 16


class Segment(NamedTuple):
    """Tokens, whether their own maximum may be their unit, and the groups that they are cut into."""

    now: slice
    calm: bool
    group: int


def segments(k: Tensor, *, holes: bool) -> tuple[list[Segment], Tensor]:
    """The segments, and the running maximum at the end of each, (..., 1 + segments, D), the first one ``FLOOR``."""
    length = k.shape[-2]
    size = block_length(k, GROUP)
    whole = length // GROUP * GROUP
    cuts = sorted({*range(0, whole, size), whole, length})
    parts = [k[..., a:b, :] for a, b in itertools.pairwise(cuts)]
    low = torch.stack([lowest(x) if holes else x[..., 0, :] for x in parts], -2)
    tops = torch.stack([k.new_full(low[..., 0, :].shape, FLOOR / 2), *(x.amax(-2) for x in parts)], -2)
    tops = tops.cummax(-2).values
    rise = tops[..., 1:, :] - torch.maximum(tops[..., :-1, :], low)
    calm = (rise <= RANGE).movedim(-2, 0).flatten(1).all(-1).tolist()
    return [
        Segment(slice(a, b), fine, GROUP if b - a >= GROUP else b - a)
        for (a, b), fine in zip(itertools.pairwise(cuts), calm, strict=True)
    ], tops


def lowest(k: Tensor) -> Tensor:
    """The smallest visible key of every channel; infinite where none is."""
    return k.masked_fill(k < FLOOR / 2, float("inf")).amin(-2)


class Rows:
    """A buffer (group, ..., groups, width) and the same memory in the order of the tokens."""

    def __init__(self, like: Tensor, segment: Segment, width: int) -> None:
        count = (segment.now.stop - segment.now.start) // segment.group
        self.rows = like.new_empty(segment.group, *like.shape[:-2], count, width)
        self.tokens = self.rows.movedim(0, -2)  # (..., groups, group, width)

    def sum_up(self, carry: Tensor, *, backwards: bool = False) -> Tensor:
        """Every token becomes the sum of all up to it (or from it) and of ``carry``; the last sum, in float64."""
        rows = self.rows.unbind(0)
        rows = rows[::-1] if backwards else rows
        for one, two in itertools.pairwise(rows):
            two.add_(one)
        total = carry + rows[-1].sum(-2, keepdim=True)  # float64 never rounds to the rows' precision on its way
        carry = carry.to(self.rows.dtype)
        if self.rows.shape[-2] > 1:
            ends = rows[-1].flip(-2) if backwards else rows[-1]
            ends = torch.cat([carry, ends[..., :-1, :]], -2)
            ends = ends.mT.contiguous().cumsum(-1).mT  # fast along the last axis only
            carry = ends.flip(-2) if backwards else ends
        self.rows.add_(carry)
        return total


def _plain(q: Tensor, k: Tensor, v: Tensor, *, holes: bool) -> Tensor:
    return pool.gated_means(q, k, v)


def _walked(q: Tensor, k: Tensor, v: Tensor, before: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """A segment's outputs, and the sums at its end, in units token by token."""
    both = torch.cat([v, (k > FLOOR / 2).to(v.dtype)], -1)
    rows = pool.running(*pool.behind(Pool(top, before), k, both))
    return q.sigmoid() * pool.mean(rows.sums[..., 1:, :], v.shape[-1]), rows.sums[..., -1:, :]


def _forward(q: Tensor, k: Tensor, v: Tensor, *, keep: bool, holes: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    cuts, tops = segments(k, holes=holes)
    out, width = torch.empty_like(q), v.shape[-1]
    carry, carries = k.new_zeros(*k.shape[:-2], 1, 2 * width, dtype=torch.float64), []
    for i, segment in enumerate(cuts):
        carries.append(carry)
        old, top = tops[..., i : i + 1, :], tops[..., i + 1 : i + 2, :]
        if not segment.calm:
            queries, scores, values = (x[..., segment.now, :] for x in (q, k, v))
            out[..., segment.now, :], carry = _walked(queries, scores, values, carry.to(k.dtype), old)
            continue
        gate, scores, values, queries = (
            x[..., segment.now, :].unflatten(-2, (-1, segment.group)) for x in (out, k, v, q)
        )
        sums = Rows(k, segment, 2 * width)
        above, below = sums.tokens.split(width, -1)
        torch.mul(exp_(torch.sub(scores, top[..., None, :], out=below)), values, out=above)
        carry = sums.sum_up(carry * torch.cat([(old - top).exp()] * 2, -1))
        torch.sigmoid(queries, out=gate).mul_(above).div_(filled(below, holes=holes))
    return out, (tops, torch.cat(carries, -2)) if keep else ()


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, holes: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors, (tops, carries) = (*inputs, *gradients, *outputs), kept
    found = [torch.empty_like(x) for x in inputs]
    owed = torch.zeros_like(carries[..., :1, :])  # the gradient by the sums at the end of the segment
    for i, segment in reversed(list(enumerate(segments(inputs[1], holes=holes)[0]))):
        old, top, carry = tops[..., i : i + 1, :], tops[..., i + 1 : i + 2, :], carries[..., i : i + 1, :]
        own = [x[..., segment.now, :] for x in (*tensors, *found)]
        if segment.calm:
            fading = torch.cat([(old - top).exp()] * 2, -1)
            own = [x.unflatten(-2, (-1, segment.group)) for x in own]
            owed = _gradients(own, segment, carry * fading, owed, top, holes=holes) * fading
        else:
            *parts, owed = _walked_back(own[:4], carry, old, owed)
            for x, part in zip(own[5:], parts, strict=True):
                x.copy_(part)
    return tuple(found)


def _gradients(own: list[Tensor], segment: Segment, carry: Tensor, owed: Tensor, top: Tensor, *, holes: bool) -> Tensor:
    """Fill the gradients of one calm segment; returns the gradient by the sums in front of it."""
    q, k, v, g, out, dq, dk, dv = own
    width = v.shape[-1]
    sums, owing = Rows(top, segment, width), Rows(top, segment, 2 * width)
    exp_(torch.sub(k, top[..., None, :], out=dv))
    sums.tokens.copy_(dv)
    sums.sum_up(carry[..., width:])
    above, below = owing.tokens.split(width, -1)
    torch.sigmoid(q, out=dq)
    torch.div(g, filled(sums.tokens, holes=holes), out=below)
    torch.mul(below, dq, out=above)
    below.mul_(out).neg_()
    dq.neg_().add_(1.0).mul_(out).mul_(g)
    owed = owing.sum_up(owed, backwards=True)
    torch.mul(v, above, out=dk).add_(below).mul_(dv)
    dv.mul_(above)
    return owed


def _walked_back(own: list[Tensor], carry: Tensor, old: Tensor, owed: Tensor) -> tuple[Tensor, ...]:
    """Gradients of one walked segment by queries, keys, values and the sums in front of it."""
    with torch.enable_grad():
        q, k, v, before = leaves = [x.detach().requires_grad_() for x in (*own[:3], carry.to(own[1].dtype))]
        made = _walked(q, k, v, before, old)
        *found, before = torch.autograd.grad(made, leaves, (own[3], owed.to(own[1].dtype)))
    return *found, before.double()


upward = CustomGradient(_plain, _forward, _backward)


def causal_rows(q: Tensor, k: Tensor, v: Tensor, *, holes: bool) -> Tensor:
    """``upward`` for queries that end where the keys end; zeros before the first key."""
    if not holes and pays(k):
        dispatch.record("one cumulative sum in one unit", "causal, few tokens, and no key far above the first")
        return pool.aligned(together(pool.aligned(q, k.shape[-2]), k, v), q.shape[-2])
    dispatch.record("prefix sums over groups of tokens side by side", "causal", group=GROUP)
    return pool.aligned(upward(pool.aligned(q, k.shape[-2]), k, v, holes=holes), q.shape[-2])
