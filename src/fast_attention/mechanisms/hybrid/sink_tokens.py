"""Sink tokens: the first and last visible keys, which every query weighs exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.tracing import traced

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
        position, others = SinkTokens.positions(visible, first=first, last=last, before=before)
        return SinkTokens.at(position, k, v), others

    @staticmethod
    def positions(
        visible: Bool[Tensor, "*#batch keys"], *, first: int, last: int, before: int | Tensor = 0
    ) -> tuple[Int[Tensor, "*#batch sinks"], Bool[Tensor, "*#batch keys"]]:
        """Where they stand, and which keys are visible beside them."""
        length, number = visible.shape[-1], first + last
        if isinstance(before, int) and not traced() and length >= number and bool(visible.all()):
            others = visible.clone()
            others[..., :first] = False
            others[..., length - last :] = False
            position = torch.arange(number, device=visible.device)
            position[first:] += length - number
            return position.expand(*visible.shape[:-1], number), others
        rank = visible.cumsum(-1)
        chosen = visible & ((rank + before <= first) | (rank > rank[..., -1:] - last))
        position = torch.where(chosen, torch.arange(length, device=visible.device), MISSING)
        position = F.pad(position, (0, number), value=MISSING).sort(-1).values[..., :number]
        return position, visible & ~chosen

    @staticmethod
    def at(position: Int[Tensor, "*#batch sinks"], k: Tensor, v: Tensor) -> SinkTokens:
        """Select the keys and values at these positions."""
        index = position.clamp(max=k.shape[-2] - 1)
        return SinkTokens(_take(k, index), _take(v, index), position)

    def append(self, later: SinkTokens, number: int) -> SinkTokens:
        """The ``number`` earliest of these and later ones."""
        position, order = torch.cat([self.position, later.position], -1).sort(dim=-1, stable=True)
        order = order[..., :number]
        k, v = torch.cat([self.k, later.k], -2), torch.cat([self.v, later.v], -2)
        return SinkTokens(_take(k, order), _take(v, order), position[..., :number])


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Tokens at positions (..., 1, G), for all heads; ``take_along_dim`` would fix a traced length."""
    return x.gather(-2, index[..., None].expand(*x.shape[:-2], index.shape[-1], x.shape[-1]))
