"""Softmax attention a block of queries at a time, for scores that are sums of products, tables and outer products.

No score matrix is ever whole: a block of scores is made, normalised and used in the cache, and made again for the
gradient. Causally, a block meets the keys up to its last query only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import masks, operation, trace
from fast_attention.engine.operation import Fast, Operation
from fast_attention.mechanisms.dense.scores import Scores, spread

PAYING = 1 << 16  # scores of one head from which blocks pay
BLOCK = 1 << 19  # scores of a block: 2 MB in float32
ROWS = 128  # queries of a block at least


class Block(NamedTuple):
    """Queries ``rows`` of one sequence and head, which all see the first of the keys ``keys``."""

    batch: int
    head: int
    rows: slice
    keys: slice
    masked: Tensor | None  # (keys,): True where no query may look
    later: Tensor | None  # (rows, n): the same by query, for the last n keys


def attend(
    v: Float[Tensor, "*batch heads keys values"],
    scores: Scores,
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch 1 keys"] | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """``softmax(scores + mask) v``, causal from the bottom right corner; a query that sees nothing gets zeros."""
    trace.record(
        "softmax in blocks of queries", "scores of a block stay in the cache", rows=_size(scores.length(), v.shape[-2])
    )
    heads, batch, (keys, values) = v.shape[-3], v.shape[:-3], v.shape[-2:]
    parts = [x if x is None or x.ndim == 1 else _four(x, batch) for x in scores]
    if key_mask is not None:
        key_mask = key_mask.expand(*batch, 1, keys).reshape(-1, keys)
    elif len(batch) and all(x is None or x.ndim == 1 or x.shape[0] == 1 for x in parts):
        side = v.reshape(-1, *v.shape[-3:]).movedim(0, -2).flatten(-2)[None]  # one table for all: values side by side
        out = _ROWS(side, None, *parts, is_causal=is_causal)[0].unflatten(-1, (-1, values)).movedim(-2, 0)
        return out.reshape(*batch, *out.shape[-3:])
    out = _ROWS(v.reshape(-1, heads, keys, values), key_mask, *parts, is_causal=is_causal)
    return out.reshape(*batch, *out.shape[-3:])


def against(v: Tensor, length: int, at_least: int = PAYING) -> str:
    """Why blocks would not do; empty where they do, from ``at_least`` scores of one head on."""
    return operation.unsupported_reason(v) or few(v, length, at_least)


def few(v: Tensor, length: int, at_least: int = PAYING) -> str:
    """``against`` for ordinary tensors of a CPU."""
    return "" if length * v.shape[-2] >= at_least else "few scores"


def _four(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """(..., H, m, n) as (B, H, m, n), or (1, H, m, n) where there is one for all."""
    if x.ndim == 3:
        return x[None]
    return x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def _plain(v: Tensor, key_mask: Tensor | None, *parts: Tensor | None, is_causal: bool) -> Tensor:
    scores = Scores(*parts).whole(v.shape[-2])
    visible = None if key_mask is None else key_mask[:, None]
    mask = masks.visible(scores.shape[-2], v.shape[-2], is_causal=is_causal, key_mask=visible, device=v.device)
    return masks.masked_softmax(scores, mask) @ v


def _blocks(v: Tensor, length: int, key_mask: Tensor | None, is_causal: bool) -> Iterator[Block]:
    batch, heads, keys = v.shape[:3]
    size, shift = _size(length, keys), keys - length
    triangle = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    for b in range(batch):
        first, end, masked = (0, keys, None) if key_mask is None else _span(key_mask[b])
        start = length if first == end else max(first - shift, 0) if is_causal else 0
        for h in range(heads):
            for i in range(start, length, size):
                j = min(i + size, length)
                last = min(end, j + shift) if is_causal else end
                edge = max(last - i - shift, 0) if is_causal else 0  # keys from the first query's own on
                row = None if masked is None else masked[first:last]
                yield Block(b, h, slice(i, j), slice(first, last), row, triangle[: j - i, :edge] if edge > 1 else None)


def _span(visible: Tensor) -> tuple[int, int, Tensor | None]:
    """The first visible key, the end of the last, and the masked between them if there are any."""
    positions = visible.nonzero()[:, 0]
    if len(positions) == 0:
        return 0, 0, None
    first, end = int(positions[0]), int(positions[-1]) + 1
    return first, end, None if len(positions) == end - first else ~visible


def _weights(part: Scores, block: Block, space: Tensor) -> Float[Tensor, "rows keys"]:
    """The normalised weights of a block, in ``space``."""
    count, width = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
    out, share = space[: count * width].view(count, width), 1.0 if part.share is None else float(part.share)
    filled = 0.0
    if part.R is not None:
        if part.Q is None and part.X is None and part.share is None and block.masked is None and block.later is None:
            return torch.softmax(part.R, -1, out=out)
        torch.mul(part.R, share, out=out)
        filled = 1.0
    if part.X is not None and part.Y is not None:
        outer = (part.X[:, :, None] * part.Y[:, None, :]).flatten(1)[:, block.keys]
        torch.add(outer, out, alpha=filled, out=out) if filled else out.copy_(outer)
        filled = 1.0
    if part.Q is not None and part.K is not None:
        torch.addmm(out, part.Q, part.K.mT, beta=filled, out=out)
    if block.masked is not None:
        out.masked_fill_(block.masked, float("-inf"))
    if block.later is not None:
        later = min(block.later.shape[1], width)
        out[:, width - later :].masked_fill_(block.later[:, block.later.shape[1] - later :], float("-inf"))
    return torch.softmax(out, -1, out=out)


def _forward(
    v: Tensor, key_mask: Tensor | None, *parts: Tensor | None, is_causal: bool, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    scores = Scores(*parts)
    length = scores.length()
    out = v.new_zeros(*v.shape[:2], length, v.shape[3])
    space = v.new_empty(_size(length, v.shape[2]) * v.shape[2])
    for block in _blocks(v, length, key_mask, is_causal):
        b, h, rows, keys = block[:4]
        weights = _weights(scores.of(b, h, rows, keys), block, space)
        torch.mm(weights, v[b, h, keys], out=out[b, h, rows])
    return out, ()


def _size(length: int, keys: int) -> int:
    return min(max(BLOCK // max(keys, 1), ROWS), length)


def _backward(
    inputs: tuple[Tensor | None, ...], outputs: Any, saved: Any, gradients: tuple[Tensor, ...], *, is_causal: bool
) -> tuple[Tensor | None, ...]:
    v, key_mask, *parts = inputs
    assert v is not None
    scores, g = Scores(*parts), gradients[0].contiguous()
    once = key_mask is None and (scores.R is None or (len(scores.R) == len(v) and g.shape[2] <= v.shape[2]))
    dv, grads = _grads(v, scores, once)
    mean, turned, length = (g * outputs[0]).sum(-1, keepdim=True), g.mT.contiguous(), g.shape[2]
    space, slopes = v.new_empty(2, _size(length, v.shape[2]) * v.shape[2])
    for block in _blocks(v, length, key_mask, is_causal):
        b, h, rows, keys = block[:4]
        part = scores.of(b, h, rows, keys)
        weights = _weights(part, block, space)
        if dv is not None:
            dv.mT[b, h, :, keys].addmm_(turned[b, h, :, rows], weights)
        slope = torch.mm(g[b, h, rows], v[b, h, keys].mT, out=slopes[: weights.numel()].view(weights.shape))
        slope.sub_(mean[b, h, rows])
        spread(weights.mul_(slope), part, grads.of(b, h, rows, keys), keys, once)
        if grads.R is not None and once:
            grads.R[b, h, rows, keys.stop :] = 0.0
    return dv, None, *grads


def _grads(v: Tensor, scores: Scores, once: bool) -> tuple[Tensor | None, Scores]:
    """Room for the gradients: zeros, but for a table of which each block is met once; by column what keys share."""
    v_, Q, K, R, share, X, Y = (x if x is not None and x.requires_grad else None for x in (v, *scores))
    v_, K = (None if x is None else x.mT.new_zeros(x.mT.shape).mT for x in (v_, K))
    Q, share, X, Y = (None if x is None else x.new_zeros(x.shape) for x in (Q, share, X, Y))
    if R is not None:
        R = R.new_empty(R.shape) if once else R.new_zeros(R.shape)
    return v_, Scores(Q, K, R, share, X, Y)


_ROWS = Operation(_plain, cpu=Fast(_forward, _backward))
