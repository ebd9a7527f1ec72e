"""Exact weights for near keys, products of features for far ones, one normaliser over both: in blocks of queries.

A block of queries reads a span of keys around it. Where a pair of the span lies outside the window, and for all keys
beyond the span, the logarithm of ``phi_q(q_i) . phi_k(k_j)`` takes the place of the logit; keys beyond the span are
summed up and enter as one more key. So one softmax normalises everything, and the exponential of a large number is
never taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.combinations.landmarks import Landmarks
from fast_attention.combinations.spans import Plan, Window
from fast_attention.ops.blocks import join, split
from fast_attention.ops.linear import linear
from fast_attention.ops.linear.linear import LinearState
from fast_attention.ops.maps.feature_map import Features
from fast_attention.ops.scan import FLOOR
from fast_attention.ops.windows.banded import reach, slices


class Rows(NamedTuple):
    """Queries, the keys around them, what both are as features, and what lies beyond every span."""

    q: Float[Tensor, "*batch length width"]
    k: Float[Tensor, "*batch keys width"]
    v: Float[Tensor, "*batch keys values"]
    seen: Bool[Tensor, "*#batch keys"] | None  # None: all
    marks: Landmarks
    queries: Features
    keys: Features
    beyond: LinearState

    def apart(self) -> list[Rows]:
        """Every head of every sequence by itself."""
        lead = self.q.shape[:-2]
        own = (*self[:4], *self.marks, *self.queries, *self.keys, *self.beyond)
        parts = []
        for x, rank in zip(own, RANKS, strict=True):
            x = x if x is None else x.expand(*lead, *x.shape[x.ndim - rank :]).flatten(0, len(lead) - 1)
            parts.append([None] * lead.numel() if x is None else x.unbind())
        return [
            Rows(q, k, v, seen, Landmarks(*t[:3]), Features(*t[3:5]), Features(*t[5:7]), LinearState(*t[7:]))
            for q, k, v, seen, *t in zip(*parts, strict=True)
        ]


RANKS = (2, 2, 2, 1, 2, 2, 1, 2, 1, 2, 1, 3, 2, 1)  # axes of a head, tensor by tensor


def rows(given: Rows, plan: Plan) -> Float[Tensor, "*batch length values"]:
    """Outputs of queries over their spans, the landmarks and what lies beyond every span."""
    block, number, q, marks = plan.block, plan.number, given.q, given.marks

    def around(x: Tensor) -> Tensor:
        return slices(x, block=block, behind=plan.window.left, ahead=plan.ahead, number=number, start=plan.start)

    def row(x: Tensor | None, cut: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if x is None else cut(x[..., None])[..., 0]

    seen = given.seen
    if seen is None and not plan.within(given.k.shape[-2]):
        seen = torch.ones(given.k.shape[-2], dtype=torch.bool, device=q.device)
    blocks = Blocks(
        split(q * q.shape[-1] ** -0.5, block), around(given.k), around(given.v), row(seen, around),
        Features(split(given.queries.values, block), row(given.queries.log_scale, lambda x: split(x, block))),
        Features(around(given.keys.values), row(given.keys.log_scale, around)),
        given.beyond,
    )  # fmt: skip
    place = torch.arange(block, device=q.device) + torch.arange(number, device=q.device)[:, None] * block + plan.start
    known = marks.present[..., None, None, :]
    if plan.window.is_causal:
        known = known & (marks.place[..., None, None, :] <= place[..., None])
    return join(_attend(blocks, marks, known, plan.window), q.shape[-2])


class Blocks(NamedTuple):
    """Blocks of queries, the spans of keys that they read, and the sums of the keys beyond these."""

    q: Float[Tensor, "*batch blocks rows width"]  # times 1/sqrt(width)
    k: Float[Tensor, "*batch blocks span width"]
    v: Float[Tensor, "*batch blocks span values"]
    seen: Bool[Tensor, "*#batch blocks span"] | None
    queries: Features
    keys: Features
    beyond: LinearState


def _attend(blocks: Blocks, marks: Landmarks, known: Tensor, window: Window) -> Tensor:
    """Outputs of all blocks (..., blocks, rows, Ev); ``known`` (..., #blocks, #rows, marks): landmarks to be seen."""
    rows, span, device = blocks.q.shape[-2], blocks.k.shape[-2], blocks.q.device
    ahead, hidden = span - rows - window.left, None if blocks.seen is None else ~blocks.seen[..., None, :]
    near = reach(rows, window.left, ahead, left=window.left, right=window.right, device=device)
    end = max(rows, window.left + window.right + 1)  # from here on keys are too far ahead for some queries
    if window.is_causal:
        later = ~reach(rows, window.left, ahead, left=None, right=0, device=device)
        hidden, end = later if hidden is None else hidden | later, span
    exact, parts = blocks.q @ blocks.k.mT, []
    for columns, mixed in ((slice(0, rows), rows > 1), (slice(rows, end), False), (slice(end, span), end < span)):
        part = exact[..., columns]
        if mixed:
            part = torch.where(near[:, columns], part, _estimated(blocks, columns))
        parts.append(part if hidden is None else torch.where(hidden[..., columns], float("-inf"), part))
    marked = (blocks.q @ marks.k[..., None, :, :].mT).masked_fill(~known, float("-inf"))
    summed, scale = linear.read(blocks.queries.values, blocks.beyond), blocks.queries.log_scale
    beyond = _log(summed.denominator, scale, blocks.beyond.top[..., None]).clamp_min(FLOOR)  # finite: it may be alone
    weights = torch.cat([*parts, marked, beyond[..., None]], -1).softmax(-1)
    out = weights[..., :span] @ blocks.v + weights[..., span:-1] @ marks.v[..., None, :, :]
    return out + weights[..., -1:] * linear.normalise(summed)


def _estimated(blocks: Blocks, columns: slice) -> Tensor:
    """Logits from features, for some keys of the spans."""
    (fq, a), (fk, b) = blocks.queries, blocks.keys
    a, b = None if a is None else a[..., None], None if b is None else b[..., None, columns]
    return _log(fq @ fk[..., columns, :].mT, a, b)


def _log(product: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """``a + b + log(product)``; minus infinity, without a gradient, where the product is too small to mean anything."""
    info = torch.finfo(product.dtype)
    least = info.tiny / info.eps
    logs = torch.where(product < least, float("-inf"), product.clamp_min(least).log())
    logs = logs if a is None else logs + a
    return logs if b is None else logs + b
