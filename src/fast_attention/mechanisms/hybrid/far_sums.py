"""Sums over the keys beyond the hybrid's spans: by blocks, and for every block of queries all before and behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.blocks import slices
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.states import state_sums
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.spans import Plan
from fast_attention.mechanisms.linear.linear_state import LinearState


class FarSums(NamedTuple):
    """What stretches of keys leave behind; the true sums are ``exp(top)`` times ``both``."""

    both: Float[Tensor, "*batch stretches C values_and_one"]  # sum_j phi(k_j) [v_j, 1]
    top: Float[Tensor, "*batch stretches"]

    @staticmethod
    def of(states: LinearState) -> FarSums:
        """From the states of linear attention, one of each stretch."""
        return FarSums(torch.cat([states.kv, states.k[..., None]], -1), states.log_scale[..., 0])

    def part(self, start: int, number: int) -> FarSums:
        """Some of the stretches."""
        return FarSums(self.both.narrow(-3, start, number), self.top.narrow(-1, start, number))

    def room(self, number: int) -> FarSums:
        """Uninitialised, for ``number`` stretches like these."""
        both, top = self
        return FarSums(
            both.new_empty(*both.shape[:-3], number, *both.shape[-2:]), top.new_empty(*top.shape[:-1], number)
        )

    def flipped(self) -> FarSums:
        """The last stretch first."""
        return FarSums(self.both.flip(-3), self.top.flip(-1))


def summed(keys: Features, v: Float[Tensor, "*batch keys values"], *, start: int, block: int, number: int) -> FarSums:
    """The sums over each of ``number`` blocks of keys from position ``start`` on; there need be no keys."""

    def cut(x: Tensor) -> Tensor:
        return slices(x, block=block, behind=0, ahead=0, number=number, start=start)

    both, top = cut(torch.cat([v, torch.ones_like(v[..., :1])], -1)), None
    if keys.log_scale is not None:
        inside = cut(torch.ones_like(keys.log_scale[..., None], dtype=torch.bool))
        scale = cut(keys.log_scale[..., None]).masked_fill(~inside, FLOOR)
        top = scale.detach().amax(-2)
        both = both * (scale - top[..., None]).exp()
    sums = cut(keys.values).mT @ both
    return FarSums(sums, torch.zeros_like(sums[..., 0, 0]) if top is None else top[..., 0])


def outside(states: FarSums, before: FarSums, plan: Plan) -> FarSums:
    """For every block of queries the sums of the keys in front of its span and, unless causal, of those behind it.

    ``states`` are those of the blocks of keys, ``before`` is that of all keys before the first block.
    """
    path = _WALKED if states.both.is_cpu else _plain
    return FarSums(path(*states, *before, plan=plan), Units.of(states.top, before.top, plan).out)


class Units(NamedTuple):
    """The largest scale before every stretch, from it on, and of all that a block of queries sees."""

    up: Float[Tensor, "*batch stretches_and_one"]
    down: Float[Tensor, "*batch stretches_and_one"]
    out: Float[Tensor, "*batch blocks"]

    @staticmethod
    def of(top: Tensor, first_top: Tensor, plan: Plan) -> Units:
        """From the units of the blocks of keys and of all keys before these."""
        up = cummax(torch.cat([first_top, top], -1), -1)
        down = cummax(torch.cat([torch.full_like(first_top, FLOOR), top.flip(-1)], -1), -1).flip(-1)
        out = up.narrow(-1, plan.lead, plan.number)
        if not plan.window.is_causal:
            out = torch.maximum(out, down.narrow(-1, plan.lead + plan.behind, plan.number))
        return Units(up, down, out)


def _plain(both: Tensor, top: Tensor, first: Tensor, first_top: Tensor, *, plan: Plan) -> Tensor:
    states, units = FarSums(both, top), Units.of(top, first_top, plan)
    parts = [_so_far(FarSums(first, first_top), states).part(plan.lead, plan.number)]
    if not plan.window.is_causal:
        nothing = FarSums(torch.zeros_like(first), torch.full_like(first_top, FLOOR))
        later = _so_far(nothing, states.flipped()).flipped()
        parts.append(later.part(plan.lead + plan.behind, plan.number))
    scaled = [part.both * (part.top - units.out).exp()[..., None, None] for part in parts]
    return scaled[0] if len(scaled) == 1 else scaled[0] + scaled[1]


def _so_far(first: FarSums, states: FarSums) -> FarSums:
    """``first``, then the sums up to the end of every block: one more than there are blocks."""
    both, top = torch.cat([first.both, states.both], -3), torch.cat([first.top, states.top], -1)
    level = cummax(top, -1)
    sums = state_sums((both * (top - level).exp()[..., None, None]).flatten(-2), level)
    return FarSums(sums.unflatten(-1, both.shape[-2:]), level)


Part = tuple[Tensor, Tensor]  # a tensor and its factor


class Track(NamedTuple):
    """A walk over the stretches with one sum: what joins it, what it is then added to; None: nothing.

    The walk of the gradients goes the other way, with the parts of sources and goals exchanged.
    """

    sources: Sequence[Part | None]
    goals: Sequence[Part | None]
    fades: Sequence[Tensor]  # factors of the sum from each step to the next

    def back(self) -> Track:
        """The transposed walk."""
        return Track(self.goals[::-1], self.sources[::-1], self.fades[::-1])

    def walk(self, total: Tensor) -> Tensor:
        """Walk with ``total`` as the sum, which changes in place."""
        for step, (source, goal) in enumerate(zip(self.sources, self.goals, strict=True)):
            if step:
                total.mul_(self.fades[step - 1])
            if source is not None:
                total.addcmul_(*source)
            if goal is not None:
                goal[0].addcmul_(total, goal[1])
        return total


def _tracks(blocks: Tensor, top: Tensor, units: Units, out: Tensor, plan: Plan) -> list[Track]:
    """The walks up and, unless causal, down the sequence, from ``blocks`` to ``out``."""
    lead, last, end = plan.lead, plan.lead + plan.number - 1, plan.lead + plan.behind
    up, down, level = units
    up, x, y = up[..., : last + 1], blocks.unbind(-3), out.unbind(-3)
    sources = [None, *zip(x[:last], _factors(top[..., :last] - up[..., 1:]), strict=True)]
    goals = [*[None] * lead, *zip(y, _factors(up[..., lead:] - level), strict=True)]
    tracks = [Track(sources, goals, _factors(up[..., :-1] - up[..., 1:]))]
    if not plan.window.is_causal:  # nothing is behind the last block
        top, down, level = (t.flip(-1) for t in (top[..., end:], down[..., end:-1], level[..., :-1]))
        sources = list(zip(x[end:][::-1], _factors(top - down), strict=True))
        goals = list(zip(y[:-1][::-1], _factors(down - level), strict=True))
        tracks.append(Track(sources, goals, _factors(down[..., :-1] - down[..., 1:])))
    return tracks


def _factors(differences: Tensor) -> tuple[Tensor, ...]:
    """Of every stretch, (..., 1, 1)."""
    return differences.exp()[..., None, None].unbind(-3)


def _forward(
    both: Tensor, top: Tensor, first: Tensor, first_top: Tensor, *, plan: Plan, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = both.new_zeros(*both.shape[:-3], plan.number, *both.shape[-2:])
    begin = first[..., 0, :, :].clone()
    for track in _tracks(both, top, Units.of(top, first_top, plan), out, plan):
        track.walk(begin)
        begin.zero_()
    return out, ()


def _backward(
    inputs: Tensors, outputs: Tensors, kept: Tensors, gradients: tuple[Tensor, ...], *, plan: Plan
) -> Tensors:
    both, top, first, first_top = (x for x in inputs if x is not None)
    found = torch.zeros_like(both)
    tracks = _tracks(found, top, Units.of(top, first_top, plan), gradients[0], plan)
    begin = [track.back().walk(torch.zeros_like(first[..., 0, :, :])) for track in tracks]
    return found, None, begin[0].unsqueeze(-3), None


_WALKED = CustomGradient(_plain, _forward, _backward)
