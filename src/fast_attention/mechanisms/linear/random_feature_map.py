"""Random feature maps as values, and the weights of the heads that they have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fast_attention.feature_maps.feature_map import Features, Logs
from fast_attention.feature_maps.random_features import positive, trigonometric


class Heads(NamedTuple):
    """The weights of some heads: rows (..., m, d), what is added to every exponent (..., 1, C), and the keys' own rows
    where they are not those of the queries.
    """

    rows: Tensor
    bias: Tensor | None = None
    key_rows: Tensor | None = None

    @property
    def keys(self) -> Heads:
        """The map that keys use."""
        return self if self.key_rows is None else Heads(self.key_rows, self.bias)


@dataclass(frozen=True)
class RandomFeatureMap:
    """From tokens to features: ``z = d^(-1/4) W x``, then ``kind``, exponents plus a bias."""

    kind: Literal["positive", "hyperbolic", "sincos"]

    @property
    def pairs(self) -> bool:
        """Whether each row makes two features."""
        return self.kind != "positive"

    @property
    def exponential(self) -> bool:
        """Whether features are exponentials."""
        return self.kind != "sincos"

    def width(self, rows: Tensor) -> int:
        """Features of rows (..., m, d)."""
        return rows.shape[-2] * (2 if self.pairs else 1)

    def rows(self, heads: Heads) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of queries and of keys, those of all exponentials or of pairs of a cosine and a sine, and the bias."""
        rows, key_rows = (
            torch.cat([x.rows, -x.rows], -2) if self.kind == "hyperbolic" else x.rows for x in (heads, heads.keys)
        )
        return rows, rows if heads.key_rows is None else key_rows, heads.bias

    def plain(self, x: Tensor, heads: Heads, factor: float = 0.0) -> Features | Logs:
        """Features of keys, times ``e^factor``, in operations that autograd follows."""
        x = x * x.shape[-1] ** -0.25
        if self.exponential:
            return positive(x, heads.rows, heads.bias, hyperbolic=self.kind == "hyperbolic", factor=factor)
        values, scale = trigonometric(x, heads.rows)
        assert scale is not None
        return Features(values, scale + (math.log(heads.rows.shape[-2]) / 2 + factor))

    def unbiased(self, x: Tensor, heads: Heads) -> Features | Logs:
        """``plain`` of queries, with what ``plain`` leaves out of both: times ``plain`` of keys it estimates exp."""
        count = self.width(heads.rows) if self.exponential else heads.rows.shape[-2]
        return self.plain(x, heads, -math.log(count))


POSITIVE, HYPERBOLIC, SINCOS = RandomFeatureMap("positive"), RandomFeatureMap("hyperbolic"), RandomFeatureMap("sincos")
