"""Sums over the keys beyond the hybrid's spans: by blocks, and for every block of queries all before and behind."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.combinations.spans import Plan
from fast_attention.kernelised import Map
from fast_attention.ops.linear import linear
from fast_attention.ops.linear.linear import LinearState
from fast_attention.ops.maps.feature_map import Features
from fast_attention.ops.scan import FLOOR, cummax
from fast_attention.ops.states import state_sums
from fast_attention.ops.windows.banded import slices


def summed(
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    seen: Bool[Tensor, "*#batch keys"] | None,
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
