"""Sums of features and values over every block of keys, and their gradients."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine.scan import FLOOR
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.block_products import multiply
from fast_attention.mechanisms.hybrid.call import Call, Gradients
from fast_attention.mechanisms.hybrid.far_sums import FarSums
from fast_attention.mechanisms.hybrid.positions import Chunk, in_blocks


def block_sums(call: Call) -> FarSums:
    """The sums of all blocks of keys."""
    sums = call.tokens.k.new_empty(len(call.tokens.k), call.plan.key_blocks, *call.earlier.sums.shape[-2:])
    log_scales = torch.full_like(sums[..., 0, 0], FLOOR)
    for chunk in call.plan.key_chunks(call.tokens.q, call.tokens.k):
        into, runs = sums[:, chunk.blocks], _runs(call, chunk)
        first, last = (runs[0][0].start, runs[-1][0].stop) if runs else (0, 0)
        for empty in (into[:, :first], into[:, last:]):
            empty.zero_()
        if runs:
            keys = call.maps.features(1, chunk.keys)
            units = _largest(call, chunk, keys)
            log_scales[:, chunk.blocks] = units
            held = weighed(call, chunk, factors(call, chunk, keys, units))
            for blocks, rows in runs:
                k, v = (in_blocks(x[:, rows], blocks) for x in (keys.values, held))
                multiply(k.mT, v, out=into[:, blocks])
    return FarSums(sums, log_scales)


def add_block_gradients(call: Call, d_sums: Tensor, d: Gradients) -> None:
    """Add the gradients of ``block_sums`` for keys, values and weights."""
    for chunk in call.plan.key_chunks(call.tokens.q, call.tokens.k):
        if runs := _runs(call, chunk):
            keys, pull = call.maps.differentiable(1, chunk.keys, d.k, d.weights)
            factor = factors(call, chunk, keys, _largest(call, chunk, keys))
            held = weighed(call, chunk, factor)
            d_values, d_weighed, into = torch.zeros_like(keys.values), torch.zeros_like(held), d_sums[:, chunk.blocks]
            for blocks, rows in runs:
                k, v = (in_blocks(x[:, rows], blocks) for x in (keys.values, held))
                multiply(v, into[:, blocks].mT, out=in_blocks(d_values[:, rows], blocks))
                multiply(k, into[:, blocks], out=in_blocks(d_weighed[:, rows], blocks))
            d_log_scale = torch.linalg.vecdot(d_weighed, held)
            d.tokens.v[:, chunk.keys, : call.widths[1]].addcmul_(d_weighed[..., :-1], factor)
            pull(d_values, d_log_scale)


def _runs(call: Call, chunk: Chunk) -> list[tuple[slice, slice]]:
    return chunk.runs(chunk.keys.stop - chunk.keys.start, call.plan.block, start=chunk.start)


def visible_scales(call: Call, chunk: Chunk, keys: Features) -> Tensor | None:
    """The log scales of the keys that are summed up, ``FLOOR`` for others."""
    if keys.log_scale is None:
        return None
    return keys.log_scale.masked_fill(~call.summed[:, chunk.keys], FLOOR)


def _largest(call: Call, chunk: Chunk, keys: Features) -> Tensor:
    """The largest log scale of every block of the chunk."""
    scales, block = visible_scales(call, chunk, keys), call.plan.block
    if scales is None:
        return call.tokens.k.new_zeros(len(call.tokens.k), chunk.number)
    missing = chunk.start + chunk.number * block - scales.shape[-1]
    return pad(scales, (-chunk.start, missing), value=FLOOR).unflatten(-1, (-1, block)).amax(-1)


def factors(call: Call, chunk: Chunk, keys: Features, units: Tensor) -> Float[Tensor, "heads keys 1"]:
    """``exp(log_scale - unit)`` of the keys that are summed up, 0 for others; a unit for each block or for all."""
    summed = call.summed[:, chunk.keys]
    if keys.log_scale is None:
        return summed.to(call.tokens.k.dtype)[..., None]
    if units.shape[-1] > 1:
        missing = keys.log_scale.shape[-1] - chunk.start - units.shape[-1] * call.plan.block
        units = pad(units.repeat_interleave(call.plan.block, -1), (chunk.start, missing))
    return (keys.log_scale - units).exp_().masked_fill_(~summed, 0.0)[..., None]


def weighed(call: Call, chunk: Chunk, factors: Tensor) -> Float[Tensor, "heads keys values_and_one"]:
    """Values and one, times the factor of each key."""
    v = call.tokens.v[:, chunk.keys, : call.widths[1]]
    both = v.new_empty(*v.shape[:-1], call.widths[1] + 1)
    torch.mul(v, factors, out=both[..., :-1])
    both[..., -1:] = factors
    return both
