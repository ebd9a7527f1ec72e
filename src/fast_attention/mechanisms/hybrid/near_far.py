"""Exact weights for near keys, products of features for far ones, one normaliser over both: in blocks of queries.

A block of queries reads a span of keys around it. Where a pair of the span lies outside the window, and for all keys
beyond the span, the logarithm of ``phi_q(q_i) . phi_k(k_j)`` takes the place of the logit; keys beyond the span are
summed up and enter as one more key. So one softmax normalises everything, and the exponential of a large number is
never taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.blocks import join, slices, split
from fast_attention.engine.bounds import no_less
from fast_attention.engine.scan import FLOOR
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.far_sums import FarSums
from fast_attention.mechanisms.hybrid.landmarks import Landmarks
from fast_attention.mechanisms.hybrid.spans import Plan


class Rows(NamedTuple):
    """Queries, the keys around them, what both are as features, and what lies beyond every span."""

    q: Float[Tensor, "*batch length width"]
    k: Float[Tensor, "*batch keys width"]
    v: Float[Tensor, "*batch keys values"]
    seen: Bool[Tensor, "*#batch keys"] | None  # None: all
    marks: Landmarks
    queries: Features
    keys: Features
    beyond: FarSums

    def apart(self) -> list[Rows]:
        """Every head of every sequence by itself."""
        lead = self.q.shape[:-2]
        parts = []
        for x, rank in zip(self.flat(), RANKS, strict=True):
            x = x if x is None else x.expand(*lead, *x.shape[x.ndim - rank :]).flatten(0, len(lead) - 1)
            parts.append([None] * lead.numel() if x is None else x.unbind())
        return [Rows.of(*tensors) for tensors in zip(*parts, strict=True)]

    def flat(self) -> tuple[Tensor | None, ...]:
        """All tensors in a row."""
        return (*self[:4], *self.marks, *self.queries, *self.keys, *self.beyond)

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, *t: Any) -> Rows:
        """From all tensors in a row."""
        return Rows(q, k, v, seen, Landmarks(*t[:3]), Features(*t[3:5]), Features(*t[5:7]), FarSums(*t[7:]))


RANKS = (2, 2, 2, 1, 2, 2, 1, 2, 1, 2, 1, 3, 1)  # axes of a head, tensor by tensor


class Sight(NamedTuple):
    """What the rows of a block see, the same for every head."""

    near: Bool[Tensor, "rows span"]  # exactly
    later: Bool[Tensor, "rows span"] | None  # not at all; None: they see everything
    place: Int[Tensor, "blocks rows"]  # where they stand themselves

    @staticmethod
    def of(plan: Plan, device: torch.device) -> Sight:
        """From where the blocks lie."""
        (left, right, is_causal), rows, ahead = plan.window, plan.block, plan.ahead
        near = masks.band(rows, left, ahead, left=left, right=right, device=device)
        later = ~masks.band(rows, left, ahead, left=None, right=0, device=device) if is_causal else None
        first = torch.arange(plan.number, device=device)[:, None] * rows + plan.start
        return Sight(near, later, first + torch.arange(rows, device=device))


def rows(given: Rows, sight: Sight, plan: Plan) -> Float[Tensor, "*batch length values"]:
    """Outputs of queries over their spans, the landmarks and what lies beyond every span."""
    block, marks, q = plan.block, given.marks, given.q * given.q.shape[-1] ** -0.5

    def around(x: Tensor) -> Tensor:
        return slices(x, block=block, behind=plan.window.left, ahead=plan.ahead, number=plan.number, start=plan.start)

    def row(x: Tensor | None, cut: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if x is None else cut(x[..., None])[..., 0]

    seen = given.seen
    if seen is None and not plan.within(given.k.shape[-2]):
        seen = torch.ones(given.k.shape[-2], dtype=torch.bool, device=q.device)
    marked, unknown = split(q @ marks.k.mT, block), ~marks.present[..., None, None, :]
    if sight.later is not None:
        unknown = unknown | (marks.place[..., None, None, :] > sight.place[..., None])
    blocks = Blocks(
        split(q, block), around(given.k), around(given.v), row(seen, around),
        marked.masked_fill(unknown, float("-inf")),
        Features(split(given.queries.values, block), row(given.queries.log_scale, lambda x: split(x, block))),
        Features(around(given.keys.values), row(given.keys.log_scale, around)),
        given.beyond,
    )  # fmt: skip
    out, weights = (join(x, q.shape[-2]) for x in _attend(blocks, sight, plan))
    return out + weights @ marks.v


class Blocks(NamedTuple):
    """Blocks of queries, the spans of keys that they read, logits of the landmarks, and the sums of the keys beyond."""

    q: Float[Tensor, "*batch blocks rows width"]  # times 1/sqrt(width)
    k: Float[Tensor, "*batch blocks span width"]
    v: Float[Tensor, "*batch blocks span values"]
    seen: Bool[Tensor, "*#batch blocks span"] | None
    marked: Float[Tensor, "*batch blocks rows marks"]
    queries: Features
    keys: Features
    beyond: FarSums


def _attend(blocks: Blocks, sight: Sight, plan: Plan) -> tuple[Tensor, Tensor]:
    """Outputs of all blocks (..., blocks, rows, Ev) without the landmarks' share, and the landmarks' weights."""
    (left, right, is_causal), rows, span = plan.window, plan.block, plan.span
    hidden = None if blocks.seen is None else ~blocks.seen[..., None, :]
    if sight.later is not None:
        hidden = sight.later if hidden is None else hidden | sight.later
    end = span if is_causal else max(rows, left + right + 1)  # from here on keys are too far ahead for some queries
    exact, parts = blocks.q @ blocks.k.mT, []
    for columns, mixed in ((slice(0, rows), rows > 1), (slice(rows, end), False), (slice(end, span), end < span)):
        part = exact[..., columns]
        if mixed:
            part = torch.where(sight.near[:, columns], part, _estimated(blocks, columns))
        parts.append(part if hidden is None else torch.where(hidden[..., columns], float("-inf"), part))
    return _normalised([*parts, blocks.marked], blocks.v, blocks.queries, blocks.beyond)


def nearest(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, marks: Landmarks, queries: Features, beyond: FarSums
) -> Float[Tensor, "*batch length values"]:
    """``rows`` where every key is near and every landmark known: a step of decoding."""
    q = q * q.shape[-1] ** -0.5
    pairs = ((k, seen), (marks.k, marks.present))
    parts = [torch.where(there[..., None, :], q @ keys.mT, float("-inf")) for keys, there in pairs]
    out, weights = _normalised(parts, v, queries, beyond)
    return out + weights @ marks.v


def _normalised(parts: list[Tensor], v: Tensor, queries: Features, beyond: FarSums) -> tuple[Tensor, Tensor]:
    """Outputs from logits of the keys whose values are ``v`` and what lies beyond; the weights of the others."""
    found, keys = queries.values @ beyond.both, v.shape[-2]
    summed = found[..., -1]
    least = _least(summed)
    total = no_less(_log(summed, queries.log_scale, beyond.top[..., None]), FLOOR)  # finite: it may be alone
    weights = torch.cat([*parts, total[..., None]], -1).softmax(-1)
    nothing = summed < least
    mean = found[..., :-1] / summed.masked_fill(nothing, 1.0)[..., None]  # first: weights over small sums overflow
    share = weights[..., -1].masked_fill(nothing, 0.0)
    return weights[..., :keys] @ v + share[..., None] * mean, weights[..., keys:-1]


def _estimated(blocks: Blocks, columns: slice) -> Tensor:
    """Logits from features, for some keys of the spans."""
    (fq, a), (fk, b) = blocks.queries, blocks.keys
    a, b = None if a is None else a[..., None], None if b is None else b[..., None, columns]
    return _log(fq @ fk[..., columns, :].mT, a, b)


def _log(product: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """``a + b + log(product)``; minus infinity, without a gradient, where the product is too small to mean anything."""
    least = _least(product)
    nothing = product < least
    logs = product.masked_fill(nothing, least).log().masked_fill_(nothing, float("-inf"))
    logs = logs if a is None else logs.add_(a)
    return logs if b is None else logs.add_(b)


def _least(product: Tensor) -> float:
    """Below this a product means nothing; rounded, that of a kernel that is never negative may even be."""
    info = torch.finfo(product.dtype)
    return info.tiny / info.eps
