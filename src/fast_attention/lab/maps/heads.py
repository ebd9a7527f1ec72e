"""Compares heads before and after a mechanism is put in: rows of their attention matrices, and their distance."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fast_attention.lab.calls import Call
from fast_attention.lab.records import Record, plain

MOST = 64  # rows, and blocks of keys, of a map


@dataclass
class Head:
    """One head before and after: the distance of its rows, and what is drawn of it.

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


@dataclass
class Maps(Record):
    """The heads of every layer of a model."""

    kind, noun, data, page, indent = "maps", "comparison of maps", "maps.json", "maps.html", None

    layers: list[list[Head]] = field(default_factory=list)

    @property
    def heads(self) -> list[Head]:
        """The heads of all layers."""
        return [head for heads in self.layers for head in heads]

    @property
    def median(self) -> float:
        """The median of all heads' distances in the swapped model."""
        return statistics.median(head.distance for head in self.heads)

    def parts(self) -> dict[str, Any]:
        """``{"meta": ..., "median_distance": ..., "heads": [...]}``, weights to four digits."""
        heads = [_rounded(plain(asdict(head))) for head in self.heads]
        return {"meta": self.meta, "median_distance": self.median, "heads": heads}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


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
    """All heads of a layer.

    Raises:
        Unsupported: A mechanism has no attention matrix.
    """
    positions = sampled(before.q.shape[-2])
    count = len(positions)
    exact, swapped = before.rows(positions + chosen), after.rows(positions + chosen)
    apart = distance(exact[:, :count], swapped[:, :count]).tolist()
    alone = distance(exact[:, :count], after.rows(positions, before)).tolist()
    shown = [coarse(rows).tolist() for rows in (exact, swapped)]
    return [
        Head(before.layer, i, apart[i], alone[i], a[:count], b[:count], a[count:], b[count:])
        for i, (a, b) in enumerate(zip(*shown, strict=True))
    ]
