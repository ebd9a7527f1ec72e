"""Pairs of a query and a key of its span that are far from each other: products of features, masked, in tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.scan import FLOOR
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.call import Call, Gradients
from fast_attention.mechanisms.hybrid.key_sums import factors, multiply, visible_scales, weighed
from fast_attention.mechanisms.hybrid.near import Rows, Sight, aligned
from fast_attention.mechanisms.hybrid.positions import Chunk

RANGE = 40.0  # of the log scales of keys that are summed up under one


class OutOfRange(Exception):
    """The keys of a span have log scales too far apart for one of them to serve all."""


class Pairs(NamedTuple):
    """The far keys inside the spans of a chunk of queries."""

    keys: Features
    factors: Float[Tensor, "heads keys 1"]
    weighed: Float[Tensor, "heads keys values_and_one"]
    unit: Float[Tensor, "heads 1"]

    @staticmethod
    def of(call: Call, chunk: Chunk, keys: Features, units: Tensor) -> Pairs:
        """From the features of the keys and the units of the sums outside; one unit then serves all."""
        scales = visible_scales(call, chunk, keys)
        unit = units.amax(-1, keepdim=True)
        if scales is not None:
            both = torch.cat([scales, units], -1)
            unit = both.amax(-1, keepdim=True)
            if bool((unit - both.masked_fill(both == FLOOR, torch.inf).amin(-1, keepdim=True) > RANGE).any()):
                raise OutOfRange
        factor = factors(call, chunk, keys, unit)
        return Pairs(keys, factor, weighed(call, chunk, factor), unit)


def tiles(call: Call, chunk: Chunk, sight: Sight) -> Iterator[tuple[Rows, Rows, Tensor]]:
    """Queries of a chunk, keys of it and which of their pairs are far: 1 or 0."""
    if sight.far is None:
        return
    far = sight.far.to(call.tokens.q.dtype)
    for columns in call.plan.mixed:
        for rows, keys, held in aligned(call.plan, chunk, columns):
            yield rows, keys, far[: rows.size, held]


def weights(
    queries: Float[Tensor, "heads blocks rows C"], keys: Float[Tensor, "heads blocks columns C"], far: Tensor
) -> Float[Tensor, "heads blocks rows columns"]:
    """Products of features, 0 where the pair is not far."""
    products = queries.new_empty(*queries.shape[:-1], keys.shape[-2])
    multiply(queries, keys.mT, out=products)
    return products.mul_(far)


def add_pair_gradients(
    call: Call, chunk: Chunk, sight: Sight, pairs: Pairs, above: Tensor, queries: Tensor, d_queries: Tensor,
    d: Gradients,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add the gradients of queries' features and of values; those of keys' features and of their log scales."""
    keys = pairs.keys.values
    d_keys, d_weighed = torch.zeros_like(keys), torch.zeros_like(pairs.weighed)
    for rows, span, far in tiles(call, chunk, sight):
        features, others, outer = rows.read(queries), span.read(keys), rows.read(above)
        multiply(weights(features, others, far).mT, outer, out=span.read(d_weighed), add=True)
        d_weights = weights(outer, span.read(pairs.weighed), far)
        multiply(d_weights, others, out=rows.read(d_queries), add=True)
        multiply(d_weights.mT, features, out=span.read(d_keys), add=True)
    d.tokens.v[:, chunk.keys, : call.widths[1]].addcmul_(d_weighed[..., :-1], pairs.factors)
    return d_keys, torch.linalg.vecdot(d_weighed, pairs.weighed)
