"""Feature maps that linear attention's operations make inside: of single numbers, or of products with rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.feature_maps.feature_map import FeatureMap, Features, Map
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu
from fast_attention.feature_maps.random_features import positive, trigonometric

NUMBERS = {EluPlusOne: 0, Relu: 1, Identity: 2}  # of maps of single numbers, as ``gpu.maps`` has them
EXPONENTIAL, TRIGONOMETRIC = 3, 4


class CoreMap(NamedTuple):
    """The maps of queries and of keys, of ``d^(-1/4)`` times tokens where there are rows.

    Attributes:
        number: One of ``NUMBERS``, ``EXPONENTIAL``, or ``TRIGONOMETRIC``: a cosine and a sine of each row's product.
        offset: What ``Relu`` adds.
        rows, key_rows: Those of queries and of keys.
        bias: Added to exponents.
    """

    number: int
    offset: float = 0.0
    rows: Float[Tensor, "*heads rows width"] | None = None
    key_rows: Float[Tensor, "*heads rows width"] | None = None
    bias: Float[Tensor, "*heads 1 rows"] | None = None

    @staticmethod
    def of(phi: FeatureMap) -> CoreMap | None:
        """A map of single numbers; None where it is made outside."""
        number = NUMBERS.get(type(phi))
        return None if number is None else CoreMap(number, float(getattr(phi, "offset", 0.0)))

    @staticmethod
    def exponential(
        rows: Tensor, key_rows: Tensor | None = None, bias: Tensor | None = None, *, hyperbolic: bool = False
    ) -> CoreMap:
        """Exponentials, ``hyperbolic`` ones of ``-rows`` too; without ``key_rows`` keys have the rows of queries."""
        if hyperbolic:
            rows = torch.cat([rows, -rows], -2)
            key_rows = None if key_rows is None else torch.cat([key_rows, -key_rows], -2)
        return CoreMap(EXPONENTIAL, 0.0, rows, rows if key_rows is None else key_rows, bias)

    @staticmethod
    def trigonometric(rows: Tensor, key_rows: Tensor | None = None) -> CoreMap:
        """Cosines and sines."""
        return CoreMap(TRIGONOMETRIC, 0.0, rows, rows if key_rows is None else key_rows)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an operation that name the map."""
        return {"number": self.number, "offset": self.offset}

    def maps(self, *, unbiased: bool = False) -> tuple[Map, Map]:
        """The maps in operations that autograd follows.

        ``unbiased`` queries have the factor that rows leave out of both, which normalisers cancel: products estimate
        the exponential.
        """
        if self.rows is None or self.key_rows is None:
            phi = (EluPlusOne(), Relu(self.offset), Identity())[self.number].features
            return phi, phi
        return self._of_rows(self.rows, -math.log(self.rows.shape[-2]) if unbiased else 0.0), self._of_rows(
            self.key_rows
        )

    def _of_rows(self, rows: Tensor, factor: float = 0.0) -> Map:
        """Features of products with rows, times ``e^factor``."""

        def features(x: Tensor) -> Any:
            x = x * x.shape[-1] ** -0.25
            if self.number == EXPONENTIAL:
                return positive(x, rows, self.bias, factor=factor)
            values, scale = trigonometric(x, rows)
            assert scale is not None
            return Features(values, scale + (math.log(rows.shape[-2]) / 2 + factor))

        return features
