"""AFT with biases in a window in blocks of queries, both ways: never a subtraction, so that no bias cancels.

A block of ``size`` queries is one product with the keys of its own and the neighbouring blocks (``reach`` tokens on
both sides, or before it only), weights exp(w) in the window and 1 around it; whole blocks further away come in by their
sums. All queries share one unit per channel (``steady``); other keys and biases take ``biased.windowed``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.opaque import Opaque
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import traced
from fast_attention.mechanisms.aft import biased, pool
from fast_attention.mechanisms.aft.bias_products import gated, ungated, unweighed, weighed
from fast_attention.mechanisms.aft.pool_passes import pieces, unit
from fast_attention.mechanisms.aft.prefix_pool import lowest
from fast_attention.mechanisms.aft.window_blocks import TOGETHER, Plan, Sheet, Weights, far, grouped

RANGE = 30.0  # keys may rise by this, and biases lie this far from 0: sums stay above exp(-60)


def _chunks(sheet: Sheet, plan: Plan) -> list[slice]:
    return list(pieces(sheet.count, max(1, TOGETHER // (plan.size * sheet.width))))


def _around(sheet: Sheet, plan: Plan, *, before: bool, after: bool) -> Tensor | None:
    """What each block sums over the blocks outside its products."""
    return None if plan.strict else far(sheet.own.sum(2), plan.reach // plan.size, before=before, after=after)


def _rows(now: slice, plan: Plan, length: int) -> slice:
    return slice(now.start * plan.size, min(now.stop * plan.size, length))


def _filled(k: Tensor, v: Tensor, plan: Plan) -> Sheet:
    sheet = Sheet(k, plan)
    weighed(grouped(k, plan), grouped(v, plan), grouped(unit(k), plan), sheet.tokens)
    return sheet


def _forward(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, *, keep: bool, plan: Plan
) -> tuple[Tensor, tuple[Tensor, ...]]:
    sheet, out = _filled(k, v, plan), torch.empty_like(q)
    kept = torch.empty_like(q) if keep else None
    around = _around(sheet, plan, before=True, after=not plan.is_causal)
    chunks = _chunks(sheet, plan)
    weights = Weights(band, plan, chunks[0].stop)
    buffer = k.new_empty(chunks[0].stop, plan.size, sheet.width)
    queries, made = grouped(q, plan), grouped(out, plan)
    for group in range(len(sheet.all)):
        for now in chunks:
            sums, rows = buffer[: now.stop - now.start], _rows(now, plan, k.shape[-2])
            torch.bmm(weights.of(group, now), sheet.windows[group, now], out=sums)
            if around is not None:
                sums.add_(around[group, now, None])
            tokens = sums.view(-1, *sheet.all.shape[2:])[: rows.stop - rows.start]
            below = gated(queries[group, rows], tokens, made[group, rows], holes=plan.holes)
            if kept is not None:
                grouped(kept, plan)[group, rows] = below
    return out, () if kept is None else (kept,)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, plan: Plan,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, band), found = inputs, [torch.empty_like(x) for x in inputs[:3]]
    sheet, owed = _filled(k, v, plan), Sheet(k, plan)
    owed.all.zero_()
    by_band = torch.zeros_like(band) if band.requires_grad else None
    chunks = _chunks(sheet, plan)
    weights = Weights(band, plan, chunks[0].stop)
    buffer = k.new_empty(chunks[0].stop, plan.size, sheet.width)
    sides = [grouped(x, plan) for x in (q, gradients[0], outputs[0], kept[0], found[0])]
    totals = k.new_empty(len(sheet.all), sheet.count, sheet.width)
    for group in range(len(sheet.all)):
        for now in chunks:
            sums, rows = buffer[: now.stop - now.start], _rows(now, plan, k.shape[-2])
            tokens = sums.view(-1, *sheet.all.shape[2:])
            tokens[rows.stop - rows.start :].zero_()
            query, grad, made, below, by_query = (x[group, rows] for x in sides)
            ungated(query, grad, made, below, by_query, tokens[: rows.stop - rows.start])
            torch.sum(sums, 1, out=totals[group, now])
            _spread(weights.of(group, now), sums, owed.blocks[group], now.start)
            if by_band is not None:
                _by_band(by_band, weights, sums @ sheet.windows[group, now].mT, group, rows)
    if not plan.strict:
        reach = plan.reach // plan.size
        owed.own.add_(far(totals, reach, before=not plan.is_causal, after=True)[:, :, None])
    by_keys, by_values = (grouped(x, plan) for x in found[1:])
    unweighed(grouped(v, plan), sheet.tokens, owed.tokens, by_keys, by_values)
    return *found, by_band


def _spread(weights: Tensor, sums: Tensor, owed: Tensor, start: int) -> None:
    """Add what the products' sums owe to the blocks of keys that they took in."""
    count, size = sums.shape[:2]
    for part, taken in enumerate(weights.split(size, -1)):
        owed[start + part : start + part + count].baddbmm_(taken.mT, sums)


def _by_band(by_band: Tensor, weights: Weights, by_weights: Tensor, group: int, rows: slice) -> None:
    """Add the gradient by the weights of a few blocks to that by the biases."""
    taps = weights.taps.shape[-1]
    if weights.per_head:
        inside = weights.skewed(by_weights.sum(0, keepdim=True))
        by_band[group, 0, :taps] += inside.sum((0, 1)) * weights.taps[group, 0].exp()
        return
    inside = weights.skewed(by_weights).flatten(0, 1)[: rows.stop - rows.start]
    torch.mul(inside, weights.taps[0, rows].exp(), out=by_band[0, rows, :taps])


def _plain(q: Tensor, k: Tensor, v: Tensor, band: Tensor, *, plan: Plan) -> Tensor:
    both = torch.cat([v, (k > FLOOR / 2).to(v.dtype)], -1)
    sums = biased.windowed(band, k, both, is_causal=plan.is_causal, strict=plan.strict)
    return q.sigmoid() * pool.mean(sums, v.shape[-1])


_windowed = CustomGradient(_plain, _forward, _backward)


def steady(k: Tensor, band: Tensor, plan: Plan) -> bool:
    """Whether one unit per channel serves every query, and no unit of the biases is needed beside it."""
    fine = band.detach().abs().amax() <= RANGE
    if plan.is_causal or plan.strict:
        low = lowest(k) if plan.holes else k.amin(-2) if plan.strict else k[..., 0, :]
        fine = fine & ((k.amax(-2) - low).amax() <= RANGE)
    return bool(fine)


def windowed(q: Tensor, k: Tensor, v: Tensor, band: Tensor, *, is_causal: bool, strict: bool, holes: bool) -> Tensor:
    """AFT with biases in a window: ``band`` as in ``biased.windowed``; masked keys at ``FLOOR``, their values zero."""
    return _OPAQUE(q, k, v, band, is_causal, strict, holes)[0]


def _parts(q: Tensor, k: Tensor, v: Tensor, band: Tensor, is_causal: int, strict: int, holes: int) -> tuple[Tensor]:
    return (_chosen(q, k, v, band, is_causal=bool(is_causal), strict=bool(strict), holes=bool(holes)),)


_OPAQUE = Opaque(_parts, lambda q, k, v, *others: (torch.empty_like(v, memory_format=torch.contiguous_format),))


def _chosen(q: Tensor, k: Tensor, v: Tensor, band: Tensor, *, is_causal: bool, strict: bool, holes: bool) -> Tensor:
    length, heads, reach = k.shape[-2], k.shape[-3], band.shape[-1] // 2
    shared = band.shape[0] == 1 and (band.shape[1] > 1 or heads > 1)
    size = next((size for size in (16, 32) if reach <= size), 64)
    plan = Plan(shared, size, -(-reach // size) * size, is_causal, strict, holes)
    halving = "triangles of products by halving"
    if traced():
        dispatch.record(halving, "traced, or under a function transform: keys cannot be looked at", window=reach + 1)
        return _plain(q, k, v, band, plan=plan)
    near = min(reach, max(length - 1, 0))
    plan = plan._replace(reach=-(-near // size) * size)
    why = "no token" if length == 0 else "keys or biases lie too far apart for one unit"
    if own := not (shared or band.shape[1] == 1):
        why = "every head has biases of its own for every position: blocks could share them neither way"
    if length == 0 or own or not steady(k, band, plan):
        dispatch.record(halving, why, window=reach + 1)
        return _plain(q, k, v, band, plan=plan)
    why = "all heads share each position's biases" if shared else "a head's biases are the same at all positions"
    dispatch.record("products of blocks of queries with their neighbours", why, block=size, keys=plan.keys)
    band = band[..., reach - near : reach + near + 1]
    return _windowed(q, k, v, band.expand(-1, length, -1) if shared else band, plan=plan)
