"""Kernelised attention of every query to every key in blocks: one pass over the keys, one over the queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.ops.explicit import Explicit
from fast_attention.ops.linear import linear, linear_blocks
from fast_attention.ops.linear.linear_blocks import Cut, cuts, flat, hidden_rows, inside
from fast_attention.ops.maps.feature_map import Elementwise
from fast_attention.ops.scratch import Scratch

CHUNK = 256  # tokens of one product among those that run side by side


def _numbers(width: int, values: int) -> int:
    return max(width * values, CHUNK * max(width, values))


def _accumulate(total: Tensor, terms: Tensor) -> None:
    """Add the chunks' terms (chunks, ...) to the totals (rows, ...) of float64."""
    total.add_(terms.view(total.shape[0], -1, *total.shape[1:]).sum(1))


def _spread(total: Tensor, cut: Cut) -> Tensor:
    """(rows, ...) -> (chunks, ...)."""
    total = total[cut.rows]
    return total[:, None].expand(-1, cut.chunks, *total.shape[1:]).flatten(0, 1) if cut.chunks > 1 else total


def _totals(like: Tensor, cut: Cut, width: int, values: int) -> tuple[Tensor, Tensor]:
    rows = cut.rows.stop - cut.rows.start
    return tuple(like.new_zeros((rows, width, size), dtype=torch.float64) for size in (values, 1))  # type: ignore


def _summarise(
    k: Tensor, v: Tensor, hidden: Tensor | None, phi: Elementwise, room: Scratch
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sums of ``phi(k) v^T`` (rows, C, Ev) and of ``phi(k)`` (rows, C, 1)."""
    (rows, length, width), values = k.shape, v.shape[-1]
    kv, z = v.new_empty((rows, width, values)), v.new_empty((rows, width, 1))
    for blocks in cuts(rows, length, CHUNK, _numbers(width, values)):
        totals = _totals(v, blocks[0], width, values)
        for cut in blocks:
            keys = linear_blocks.features(phi, k, cut, room, "features", hidden)
            here = linear_blocks.tokens(v, cut, room, "values", hidden)
            _accumulate(totals[0], torch.bmm(keys.mT, here, out=room("states", len(keys), width, values)))
            _accumulate(totals[1], keys.sum(1)[..., None])
        kv[blocks[0].rows], z[blocks[0].rows] = totals
    return kv, z


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool, phi: Elementwise, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (length, width), values, room = q.shape[-2:], v.shape[-1], Scratch(v)
    kv, z = _summarise(flat(k), flat(v), hidden_rows(key_mask, k), phi, room)
    out, denominators = v.new_empty((*q.shape[:-1], values)), v.new_empty((*q.shape[:-1], 1))
    flats = flat(q), flat(out), flat(denominators)
    for blocks in cuts(flats[0].shape[0], length, CHUNK, _numbers(width, values)):
        for cut in blocks:
            queries = linear_blocks.features(phi, flats[0], cut, room, "features")
            numerator = torch.bmm(queries, _spread(kv, cut), out=room("part", *queries.shape[:-1], values))
            denominator = torch.bmm(_spread(z, cut).mT, queries.mT).mT.contiguous()
            place = cut.of(flats[2]).copy_(inside(denominator, cut))
            linear_blocks.divide(inside(numerator, cut), place, eps, cut.of(flats[1]))
    return out, ((denominators, kv, z) if keep else ())


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, phi: Elementwise, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    q, k, v, key_mask = inputs
    denominators, kv, z = kept
    room, (dq, dk, dv) = Scratch(v), (x.new_empty(x.shape) for x in (q, k, v))
    made = flat(outputs[0]), flat(denominators), flat(gradients[0])
    totals = _query_gradients(flat(q), made, (kv, z), flat(dq), phi, room)
    hidden, rows, width, values = hidden_rows(key_mask, k), len(kv), k.shape[-1], v.shape[-1]
    k, v = flat(k), flat(v)
    for blocks in cuts(rows, k.shape[-2], CHUNK, _numbers(width, values)):
        for cut in blocks:
            keys = linear_blocks.features(phi, k, cut, room, "features", hidden)
            here = linear_blocks.tokens(v, cut, room, "values", hidden)
            dkv, dz = (_spread(total, cut) for total in totals)
            part = torch.bmm(keys, dkv, out=room("part", *here.shape))
            cut.of(flat(dv)).copy_(inside(part, cut))
            part = torch.bmm(here, dkv.mT, out=room("part", *keys.shape)).add_(dz)
            linear_blocks.pull(phi, k, keys, part, cut, flat(dk), hidden)
    return dq, dk, dv, None


def _query_gradients(
    q: Tensor, made: tuple[Tensor, ...], state: tuple[Tensor, Tensor], dq: Tensor, phi: Elementwise, room: Scratch
) -> tuple[Tensor, Tensor]:
    """Fill ``dq``; the gradients of the sums, (rows, C, Ev) and (rows, 1, C)."""
    (out, denominators, gradient), (kv, z), width = made, state, q.shape[-1]
    dkv, dz = torch.empty_like(kv), z.new_empty((len(z), 1, width))
    for blocks in cuts(len(q), q.shape[-2], CHUNK, _numbers(width, kv.shape[-1])):
        totals = _totals(kv, blocks[0], width, kv.shape[-1])
        for cut in blocks:
            queries = linear_blocks.features(phi, q, cut, room, "features")
            up, down = linear_blocks.quotient_gradient(out, denominators, gradient, cut, room)
            _accumulate(totals[0], torch.bmm(queries.mT, up, out=room("states", len(up), *kv.shape[1:])))
            _accumulate(totals[1], torch.bmm(down.mT, queries).mT)
            part = torch.bmm(up, _spread(kv, cut).mT, out=room("part", *queries.shape))
            part.addcmul_(down, _spread(z, cut).mT)
            linear_blocks.pull(phi, q, queries, part, cut, dq)
        dkv[blocks[0].rows], dz[blocks[0].rows] = totals[0], totals[1].mT
    return dkv, dz


def _plain(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: Elementwise, eps: float) -> Tensor:
    keys = linear.masked_keys(phi.features, k, key_mask)
    return linear.normalise(linear.read(phi(q), linear.summarise(keys, v)), eps)


attention = Explicit(_plain, _forward, _backward, fuses=True)  # (q, k, v, key_mask, *, phi, eps) -> outputs
