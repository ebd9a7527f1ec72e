"""What queries read of far keys: products of their features with the sums of the blocks outside their spans."""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.mechanisms.hybrid.call import Call, Gradients
from fast_attention.mechanisms.hybrid.far_sums import FarSums
from fast_attention.mechanisms.hybrid.key_sums import multiply
from fast_attention.mechanisms.hybrid.positions import Chunk, in_blocks


def units_of(call: Call, chunk: Chunk, outside: FarSums) -> Tensor:
    """The log scale of the sums outside, for every query of a chunk."""
    length = chunk.queries.stop - chunk.queries.start
    return outside.log_scale[:, chunk.blocks].repeat_interleave(call.plan.block, -1)[:, :length]


def products(call: Call, chunk: Chunk, outside: FarSums) -> tuple[Tensor, Tensor]:
    """The sums that a chunk of queries reads of far keys, numerators and denominators (heads, L, Ev + 1), and their log
    scales (heads, L).
    """
    queries, log_scale = call.maps.features(0, chunk.queries), units_of(call, chunk, outside)
    sums = call.tokens.v.new_empty(*queries.values.shape[:-1], call.widths[1] + 1)
    for blocks, rows in _runs(call, chunk):
        features, into = (in_blocks(x[:, rows], blocks) for x in (queries.values, sums))
        multiply(features, outside.sums[:, chunk.blocks][:, blocks], out=into)
    return sums, log_scale if queries.log_scale is None else log_scale + queries.log_scale


def _runs(call: Call, chunk: Chunk) -> list[tuple[slice, slice]]:
    return chunk.runs(chunk.queries.stop - chunk.queries.start, call.plan.block)


def add_gradients(call: Call, chunk: Chunk, outside: FarSums, above: Tensor, d: Gradients, d_outside: Tensor) -> None:
    """Add the gradients of ``products``, given that of the sums."""
    queries, pull = call.maps.differentiable(0, chunk.queries, d.q, d.weights)
    d_queries = torch.zeros_like(queries.values)
    sums, d_sums = outside.sums[:, chunk.blocks], d_outside[:, chunk.blocks]
    for blocks, rows in _runs(call, chunk):
        features, gradient = (in_blocks(x[:, rows], blocks) for x in (queries.values, above))
        multiply(gradient, sums[:, blocks].mT, out=in_blocks(d_queries[:, rows], blocks), add=True)
        multiply(features.mT, gradient, out=d_sums[:, blocks])
    pull(d_queries, torch.linalg.vecdot(d_queries, queries.values))
