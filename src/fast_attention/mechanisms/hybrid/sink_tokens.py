"""Sink tokens: the first and last visible keys, which every query weighs exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.tracing import traced
from fast_attention.mechanisms.hybrid.positions import Plan

MISSING = 2**62  # the position of a sink token that does not exist


class SinkTokens(NamedTuple):
    """The first and last visible keys, which every query weighs exactly, with values and positions.

    Positions (..., 1, G) count keys from the first one given; those of missing tokens are ``MISSING``.
    """

    k: Float[Tensor, "*batch sinks width"]
    v: Float[Tensor, "*batch sinks values"]
    position: Int[Tensor, "*#batch sinks"]

    @property
    def present(self) -> Bool[Tensor, "*#batch sinks"]:
        """Whether each of them exists."""
        return self.position < MISSING // 2

    @staticmethod
    def of(
        k: Tensor, v: Tensor, visible: Bool[Tensor, "*#batch keys"], *, first: int, last: int, before: int | Tensor = 0
    ) -> tuple[SinkTokens, Bool[Tensor, "*#batch keys"]]:
        """The first and last visible keys, each once, and which keys are visible beside them.

        ``before`` counts the visible keys of an earlier part of the sequence (..., 1, 1).
        """
        length, number = visible.shape[-1], first + last
        if isinstance(before, int) and not traced() and length >= number and bool(visible.all()):
            ends = (slice(0, first), slice(length - last, length))
            position, others = torch.arange(length, device=k.device).expand(visible.shape), visible.clone()
            position = torch.cat([position[..., end] for end in ends], -1)
            for end in ends:
                others[..., end] = False
            first_k, first_v = (torch.cat([x[..., end, :] for end in ends], -2) for x in (k, v))
            return SinkTokens(first_k, first_v, position), others
        rank = visible.cumsum(-1)
        chosen = visible & ((rank + before <= first) | (rank > rank[..., -1:] - last))
        position = torch.where(chosen, torch.arange(length, device=k.device), MISSING)
        position = F.pad(position, (0, number), value=MISSING).sort(-1).values[..., :number]
        index = position.clamp(max=length - 1)
        return SinkTokens(_take(k, index), _take(v, index), position), visible & ~chosen

    def append(self, later: SinkTokens, number: int) -> SinkTokens:
        """The ``number`` earliest of these and later ones."""
        position, order = torch.cat([self.position, later.position], -1).sort(dim=-1, stable=True)
        order = order[..., :number]
        k, v = torch.cat([self.k, later.k], -2), torch.cat([self.v, later.v], -2)
        return SinkTokens(_take(k, order), _take(v, order), position[..., :number])


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Tokens at positions (..., 1, G), for all heads; ``take_along_dim`` would fix a traced length."""
    return x.gather(-2, index[..., None].expand(*x.shape[:-2], index.shape[-1], x.shape[-1]))


def hidden(plan: Plan, sinks: SinkTokens, queries: slice) -> Bool[Tensor, "#heads sinks length"]:
    """Where a sink token has no weight beside the near keys: it is one of them, comes later, or is missing."""
    sink = sinks.position[..., None]
    if len(sink) == 1:
        hidden = sink.new_zeros(1, sink.shape[1], queries.stop - queries.start, dtype=torch.bool)
        for row, position in zip(hidden[0], sink.flatten().tolist(), strict=True):
            for tokens in _hiding(plan, position, queries):
                row[tokens] = True
        return hidden
    index = torch.arange(queries.start, queries.stop, device=sink.device)
    begin, position = index // plan.block * plan.block + (plan.start - plan.behind), index + plan.start
    end = torch.minimum(begin + plan.span, position + (plan.right + 1))
    begin = torch.maximum(begin, position - plan.left).clamp_(min=0)
    near = (sink >= begin) & (sink < end) | ~sinks.present[..., None]
    return near | (sink > position) if plan.is_causal else near


def _hiding(plan: Plan, sink: int, queries: slice) -> list[slice]:
    """The queries, counted from the first of ``queries``, for which a sink token at this position is hidden."""
    length, block, first = queries.stop - queries.start, plan.block, plan.start + queries.start
    if sink >= MISSING // 2:
        return [slice(0, length)]
    hidden = [slice(0, max(min(sink - first, length), 0))] if plan.is_causal else []
    if sink < 0:
        return hidden
    low = max((sink - plan.ahead - plan.start) // block * block, sink - plan.right - plan.start)
    high = min((sink + plan.behind - plan.start) // block * block + block, sink + plan.left + 1 - plan.start)
    begin, end = (min(max(at - queries.start, 0), length) for at in (low, high))
    return [*hidden, slice(begin, end)]
