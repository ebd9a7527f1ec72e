"""Exact weights for near keys, products of features for far ones, one normaliser over both: in blocks of queries.

A block of queries reads a span of keys around it. Where a pair of the span lies outside the window, and for all keys
beyond the span, the logarithm of ``phi_q(q_i) . phi_k(k_j)`` takes the place of the logit; keys beyond the span are
summed up and enter as one more key. So one softmax normalises everything, and the exponential of a large number is
never taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.combinations.landmarks import Landmarks
from fast_attention.kernelised import Map
from fast_attention.ops.blocks import count, join, split, split_row
from fast_attention.ops.linear import linear
from fast_attention.ops.linear.linear import LinearState
from fast_attention.ops.maps.feature_map import Features
from fast_attention.ops.scan import FLOOR, cummax
from fast_attention.ops.states import state_sums
from fast_attention.ops.windows.banded import reach, slices, smaller

BLOCK = 64  # queries that share a span of keys, and keys that are summed up together


class Window(NamedTuple):
    """Which keys are near: from ``left`` positions before a query to ``right`` after it; causal: none is seen after."""

    left: int
    right: int
    is_causal: bool


class Plan(NamedTuple):
    """Where blocks of queries, their spans and the blocks of keys that are summed up lie; positions count keys."""

    window: Window
    start: int  # the position of the first query
    block: int
    number: int  # blocks of queries
    ahead: int  # keys of a span behind its block
    first: int  # the position of the first block of keys
    several: int  # blocks of keys
    lead: int  # of those, in front of the first span

    @property
    def span(self) -> int:
        """Keys that a block of queries reads."""
        return self.window.left + self.block + self.ahead


def plan(length: int, window: Window, start: int) -> Plan:
    """For ``length`` queries, the first at position ``start``. Unless causal, spans are whole blocks."""
    block = smaller(BLOCK, length)
    number, front = count(length, block), start - window.left
    ahead = 0 if window.is_causal else window.right + -(window.left + window.right) % block
    lead = max(0, -(-front // block))
    behind = 0 if window.is_causal else (window.left + block + ahead) // block
    between = number if torch.compiler.is_exporting() else number - 1  # see ops/blocks.py: the last one is padding
    return Plan(window, start, block, number, ahead, front - lead * block, lead + between + behind, lead)


def summed(
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    seen: Bool[Tensor, "*#batch keys"],
    phi: Map,
    *,
    start: int,
    block: int,
    number: int,
) -> LinearState:
    """The sums over each of ``number`` blocks of keys from position ``start`` on; there need be no keys."""
    keys = linear.masked_keys(phi, k, seen)

    def cut(x: Tensor) -> Tensor:
        return slices(x, block=block, behind=0, ahead=0, number=number, start=start)

    scale = keys.log_scale
    if scale is not None:
        inside = cut(torch.ones_like(scale[..., None], dtype=torch.bool))
        scale = cut(scale[..., None]).masked_fill(~inside, FLOOR)[..., 0]
    return linear.summarise(Features(cut(keys.values), scale), cut(v))


def outside(states: LinearState | None, before: LinearState, nothing: LinearState, plan: Plan) -> LinearState:
    """For every block of queries the sums of the keys in front of its span and, unless causal, of those behind it."""
    earlier = _part(_so_far(before, states), plan.lead, plan.number)
    if plan.window.is_causal:
        return earlier
    later = _flipped(_so_far(nothing, None if states is None else _flipped(states)))
    return linear.combine(earlier, _part(later, plan.lead + plan.span // plan.block, plan.number))


def rows(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    seen: Bool[Tensor, "*#batch keys"],
    marks: Landmarks,
    maps: tuple[Map, Map],
    beyond: LinearState,
    plan: Plan,
) -> Float[Tensor, "*batch length values"]:
    """Outputs of queries over their spans, the landmarks and what lies ``beyond`` every span."""
    block, number, length = plan.block, plan.number, q.shape[-2]
    (fq, a), (fk, b) = maps[0](q), linear.masked_keys(maps[1], k, seen)

    def around(x: Tensor) -> Tensor:
        return slices(x, block=block, behind=plan.window.left, ahead=plan.ahead, number=number, start=plan.start)

    blocks = Blocks(
        split(q * q.shape[-1] ** -0.5, block), around(k), around(v), around(seen[..., None])[..., 0],
        Features(split(fq, block), None if a is None else split_row(a, block)),
        Features(around(fk), None if b is None else around(b[..., None])[..., 0]),
        beyond,
    )  # fmt: skip
    place = torch.arange(block, device=q.device) + torch.arange(number, device=q.device)[:, None] * block + plan.start
    known = marks.present[..., None, None, :]
    if plan.window.is_causal:
        known = known & (marks.place[..., None, None, :] <= place[..., None])
    return join(_attend(blocks, marks, known, plan.window), length)


class Blocks(NamedTuple):
    """Blocks of queries, the spans of keys that they read, and the sums of the keys beyond these."""

    q: Float[Tensor, "*batch blocks rows width"]  # times 1/sqrt(width)
    k: Float[Tensor, "*batch blocks span width"]
    v: Float[Tensor, "*batch blocks span values"]
    seen: Bool[Tensor, "*#batch blocks span"]
    queries: Features
    keys: Features
    beyond: LinearState


def _attend(blocks: Blocks, marks: Landmarks, known: Tensor, window: Window) -> Tensor:
    """Outputs of all blocks (..., blocks, rows, Ev); ``known`` (..., #blocks, #rows, marks): landmarks to be seen."""
    rows, span, device = blocks.q.shape[-2], blocks.k.shape[-2], blocks.q.device
    ahead, hidden = span - rows - window.left, ~blocks.seen[..., None, :]
    near = reach(rows, window.left, ahead, left=window.left, right=window.right, device=device)
    end = max(rows, window.left + window.right + 1)  # from here on keys are too far ahead for some queries
    if window.is_causal:
        hidden = hidden | ~reach(rows, window.left, ahead, left=None, right=0, device=device)
        end = span
    exact, parts = blocks.q @ blocks.k.mT, []
    for columns, mixed in ((slice(0, rows), rows > 1), (slice(rows, end), False), (slice(end, span), end < span)):
        part = exact[..., columns]
        if mixed:
            part = torch.where(near[:, columns], part, _estimated(blocks, columns))
        parts.append(part.masked_fill(hidden[..., columns], float("-inf")))
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
    logs = product.clamp_min(least).log().masked_fill(product < least, float("-inf"))
    logs = logs if a is None else logs + a
    return logs if b is None else logs + b


def _so_far(first: LinearState, states: LinearState | None) -> LinearState:
    """``first``, then the sums up to the end of every block: one more than there are blocks."""
    if states is None:
        return LinearState(first.kv.unsqueeze(-3), first.k.unsqueeze(-2), first.top.unsqueeze(-1))
    both = zip(first, states, (-3, -2, -1), strict=True)
    kv, k, top = (torch.cat([x.unsqueeze(axis), y], axis) for x, y, axis in both)
    level = cummax(top, -1)
    sums = state_sums(torch.cat([kv.flatten(-2), k], -1) * (top - level).exp()[..., None], level)
    size = kv.shape[-2] * kv.shape[-1]
    return LinearState(sums[..., :size].unflatten(-1, kv.shape[-2:]), sums[..., size:], level)


def _flipped(states: LinearState) -> LinearState:
    return LinearState(states.kv.flip(-3), states.k.flip(-2), states.top.flip(-1))


def _part(states: LinearState, start: int, number: int) -> LinearState:
    kv, k, top = states
    return LinearState(*(x.narrow(axis, start, number) for x, axis in ((kv, -3), (k, -2), (top, -1))))
