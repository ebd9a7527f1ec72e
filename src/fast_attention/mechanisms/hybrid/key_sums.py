"""Sums of features and values over every block of keys, and their gradients."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine.scan import FLOOR
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.call import Call, Gradients
from fast_attention.mechanisms.hybrid.far_sums import FarSums
from fast_attention.mechanisms.hybrid.positions import Chunk, in_blocks


def held(call: Call) -> slice:
    """The blocks of keys whose sums stand in memory: of few those that hold keys, of many all."""
    plan = call.plan
    return plan.holding(call.tokens.k.shape[1]) if plan.few else slice(0, plan.key_blocks)


def multiply(
    a: Float[Tensor, "heads blocks rows inner"],
    b: Float[Tensor, "heads blocks inner columns"],
    *,
    out: Float[Tensor, "heads blocks rows columns"],
    add: bool = False,
) -> None:
    """Write ``a @ b`` into ``out``, or add it: at once, or head by head where some blocks are a slice of more.

    ``torch.matmul`` would copy such slices, and its ``out`` twice.
    """
    if all(_is_flat(x) for x in (a, b, out)):
        parts = [(a.flatten(0, 1), b.flatten(0, 1), out.flatten(0, 1))]
    else:
        axis = 0 if len(a) <= a.shape[1] else 1
        parts = list(zip(a.unbind(axis), b.unbind(axis), out.unbind(axis), strict=True))
    for x, y, into in parts:
        into.baddbmm_(x, y) if add else torch.bmm(x, y, out=into)


def _is_flat(x: Tensor) -> bool:
    return 1 in x.shape[:2] or x.stride(0) == x.shape[1] * x.stride(1)


def block_sums(call: Call) -> FarSums:
    """The sums of the blocks of keys that are ``held``, and the log scales of all."""
    k, filled, begin = call.tokens.k, call.plan.holding(call.tokens.k.shape[1]), held(call).start
    sums = k.new_empty(len(k), held(call).stop - begin, *call.earlier.sums.shape[-2:])
    log_scales = k.new_full((len(k), call.plan.key_blocks), FLOOR)
    for empty in (sums[:, : filled.start - begin], sums[:, filled.stop - begin :]):
        empty.zero_()
    for chunk in call.plan.key_chunks(call.tokens.q, k):
        if runs := _runs(call, chunk):
            keys = call.maps.features(1, chunk.keys)
            units = _largest(call, chunk, keys)
            log_scales[:, chunk.blocks] = units
            values = weighed(call, chunk, factors(call, chunk, keys, units))
            for into, blocks, rows in runs:
                part, v = (in_blocks(x[:, rows], blocks) for x in (keys.values, values))
                multiply(part.mT, v, out=sums[:, into])
    return FarSums(sums, log_scales)


def add_block_gradients(call: Call, d_sums: Tensor, d: Gradients) -> None:
    """Add the gradients of ``block_sums`` for keys, values and weights."""
    for chunk in call.plan.key_chunks(call.tokens.q, call.tokens.k):
        if runs := _runs(call, chunk):
            keys, pull = call.maps.differentiable(1, chunk.keys, d.k, d.weights)
            factor = factors(call, chunk, keys, _largest(call, chunk, keys))
            values = weighed(call, chunk, factor)
            d_features, d_values = torch.zeros_like(keys.values), torch.zeros_like(values)
            for into, blocks, rows in runs:
                k, v = (in_blocks(x[:, rows], blocks) for x in (keys.values, values))
                multiply(v, d_sums[:, into].mT, out=in_blocks(d_features[:, rows], blocks))
                multiply(k, d_sums[:, into], out=in_blocks(d_values[:, rows], blocks))
            d_log_scale = torch.linalg.vecdot(d_values, values)
            d.tokens.v[:, chunk.keys, : call.widths[1]].addcmul_(d_values[..., :-1], factor)
            pull(d_features, d_log_scale)


def _runs(call: Call, chunk: Chunk) -> list[tuple[slice, slice, slice]]:
    """Runs of blocks: where their sums stand, which they are of the chunk, and their keys."""
    shift, tokens = chunk.blocks.start - held(call).start, chunk.keys.stop - chunk.keys.start
    runs = chunk.runs(tokens, call.plan.block, start=chunk.start)
    return [(slice(blocks.start + shift, blocks.stop + shift), blocks, rows) for blocks, rows in runs]


def _largest(call: Call, chunk: Chunk, keys: Features) -> Tensor:
    """The largest log scale of every block of the chunk."""
    block = call.plan.block
    if keys.log_scale is None:
        return call.tokens.k.new_zeros(len(call.tokens.k), chunk.number)
    scales = keys.log_scale.masked_fill(~call.summed[:, chunk.keys], FLOOR)  # of the keys that are summed up
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
