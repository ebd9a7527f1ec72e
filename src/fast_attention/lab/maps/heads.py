"""Rows of heads' attention matrices before and after, coarse enough to look at, and how far they are apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fast_attention.lab.calls import Call

MOST = 64  # rows, and blocks of keys, of a map


@dataclass
class Head:
    """One head before and after: how far its rows are apart, and what there is to look at.

    Maps are (R, B): the weight that each of R sampled queries lays on each of B blocks of keys; curves (C, B) are the
    same of the chosen queries.
    """

    layer: str
    head: int
    distance: float  # mean over the sampled queries of half the sum of absolute differences: of two laws, 0 to 1
    own_distance: float  # the same where both attend with the original's queries and keys
    original: list[list[float]]
    swapped: list[list[float]]
    original_curves: list[list[float]]
    swapped_curves: list[list[float]]


def sampled(length: int, most: int = MOST) -> list[int]:
    """At most ``most`` positions, evenly over a sequence, its ends among them."""
    count = min(length, most)
    return [round(i * (length - 1) / max(count - 1, 1)) for i in range(count)]


def blocks(keys: int, most: int = MOST) -> list[int]:
    """Where at most ``most`` blocks of keys begin, and the end: sizes differ by one at most."""
    count = min(keys, most)
    return [i * keys // count for i in range(count + 1)]


def coarse(rows: Tensor) -> Tensor:
    """Rows (..., S) summed over the blocks of keys (..., B)."""
    edges = torch.tensor(blocks(rows.shape[-1]))
    sums = torch.nn.functional.pad(rows.double().cumsum(-1), (1, 0))
    return sums[..., edges[1:]] - sums[..., edges[:-1]]


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean over rows (..., R, S) of half the sum of absolute differences: the total variation, where rows are laws."""
    return 0.5 * (a.double() - b.double()).abs().sum(-1).mean(-1)


def compared(before: Call, after: Call, chosen: list[int]) -> list[Head]:
    """All heads of a layer; the rows of the matrices are let go again.

    Raises:
        Unsupported: A mechanism has no attention matrix.
    """
    places = sampled(before.q.shape[-2])
    asked = places + chosen
    exact, swapped = before.rows(asked), after.rows(asked)
    apart = distance(exact[:, : len(places)], swapped[:, : len(places)]).tolist()
    alone = distance(exact[:, : len(places)], after.rows(places, before)).tolist()
    shown = [coarse(rows).tolist() for rows in (exact, swapped)]
    cut = len(places)
    return [
        Head(before.layer, i, apart[i], alone[i], a[:cut], b[:cut], a[cut:], b[cut:])
        for i, (a, b) in enumerate(zip(*shown, strict=True))
    ]
