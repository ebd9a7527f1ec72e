"""The first and the last visible keys of a sequence, which every query weighs exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

NOWHERE = 2**62  # the place of a landmark that there is not


class Landmarks(NamedTuple):
    """Keys (..., H, G, E) and values (..., H, G, Ev) with their places (..., 1, G), ``NOWHERE`` for missing ones."""

    k: Float[Tensor, "*batch marks width"]
    v: Float[Tensor, "*batch marks values"]
    place: Int[Tensor, "*#batch marks"]

    @property
    def present(self) -> Bool[Tensor, "*#batch marks"]:
        """Which there are."""
        return self.place < NOWHERE // 2


def landmarks(
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    seen: Bool[Tensor, "*#batch keys"],
    *,
    first: int,
    last: int,
    before: int | Tensor = 0,
) -> tuple[Landmarks, Bool[Tensor, "*#batch keys"]]:
    """The first and last of the keys ``seen``, each once, and which keys are seen beside them.

    ``before`` counts the visible keys before these (..., 1, 1): they were the first.
    """
    length, several = seen.shape[-1], first + last
    rank = seen.cumsum(-1)
    chosen = seen & ((rank + before <= first) | (rank > rank[..., -1:] - last))
    place = torch.where(chosen, torch.arange(length, device=k.device), NOWHERE)
    place = F.pad(place, (0, several), value=NOWHERE).sort(-1).values[..., :several]
    index = place.clamp(max=length - 1)
    return Landmarks(_taken(k, index), _taken(v, index), place), seen & ~chosen


def joined(earlier: Landmarks, later: Landmarks, count: int) -> Landmarks:
    """The ``count`` earliest landmarks of two stretches that follow each other."""
    place, order = torch.cat([earlier.place, later.place], -1).sort(dim=-1, stable=True)
    order = order[..., :count]
    k, v = torch.cat([earlier.k, later.k], -2), torch.cat([earlier.v, later.v], -2)
    return Landmarks(_taken(k, order), _taken(v, order), place[..., :count])


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Tokens by their places (..., 1, G), for all heads; ``take_along_dim`` would fix a traced length."""
    return x.gather(-2, index[..., None].expand(*x.shape[:-2], index.shape[-1], x.shape[-1]))
