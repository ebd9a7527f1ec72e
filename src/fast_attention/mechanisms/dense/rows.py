"""Attends a block of queries at a time, for scores that are sums of products, tables and outer products.

No score matrix is ever whole: a block of scores is made, weighed and used in the cache, and made again for the
gradient. Causally, a block meets the keys up to its last query only. Weights are the softmax of the scores, or what of
them is above zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import dropout as drop_weights

from fast_attention.engine import masks, numerics, trace
from fast_attention.engine.chunks import chunks_of
from fast_attention.engine.operation import Fast, Operation, Tensors
from fast_attention.mechanisms.dense.scores import Scores, spread

PAYING = 1 << 16  # scores of one head from which blocks pay
BLOCK = 1 << 17  # scores of a block of several heads: half a megabyte in float32
ROWS = 128  # queries of a block: causally, more of them would meet more keys that come later


class Rectified(NamedTuple):
    """Weights ``relu(score)^power`` instead of a softmax; over their sum and ``eps``, unless that is None."""

    power: int
    eps: float | Tensor | None = None
    counted: bool = False  # weights are over the number of keys seen; not in blocks

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """The weights of all scores, zero where ``mask`` lets nothing through."""
        weights = (scores if mask is None else scores.masked_fill(~mask, 0.0)).relu()
        weights = weights.square() if self.power == 2 else weights
        if self.counted:
            seen = scores.shape[-1] if mask is None else mask.expand(scores.shape).sum(-1, keepdim=True).clamp_min(1)
            return weights / seen
        return weights if self.eps is None else weights / self.divisors(weights.sum(-1, keepdim=True))

    def divisors(self, sums: Tensor) -> Tensor:
        """The divisors of rows whose weights have these sums."""
        assert self.eps is not None
        total = numerics.nan_if_infinite(sums + self.eps)
        return total.masked_fill(total == 0.0, 1.0)

    def slopes_(self, slopes: Tensor, rectified: Tensor) -> Tensor:
        """The gradients of scores, in place, from those of weights; the ``rectified`` scores become weights."""
        if self.power == 2:
            slopes.mul_(rectified).mul_(2.0)
            rectified.square_()
            return slopes
        return torch.ops.aten.threshold_backward.grad_input(slopes, rectified, 0.0, grad_input=slopes)


class Block(NamedTuple):
    """Queries ``rows`` of one sequence and some heads, which all see the first of the keys ``keys``."""

    batch: int
    heads: slice
    rows: slice
    keys: slice
    masked: Tensor | None  # (keys,): True where no query may look
    most: Tensor | None  # (rows, n): for the last n keys minus infinity where a query comes before them, else infinity


def attend(
    v: Float[Tensor, "*batch heads keys values"],
    scores: Scores,
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch 1 keys"] | None = None,
    rectified: Rectified | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """``softmax(scores + mask) v``, causal from the bottom right corner; a query that sees nothing gets zeros."""
    path = f"{'relu' if rectified else 'softmax'} in blocks of queries"
    trace.record(path, "scores of a block stay in the cache", rows=min(ROWS, scores.length()))
    heads, batch, (keys, values) = v.shape[-3], v.shape[:-3], v.shape[-2:]
    settings: Any = {"is_causal": is_causal, "rectified": rectified}
    parts = [x if x is None or x.ndim == 1 else _four(x, batch) for x in scores]
    if key_mask is not None:
        key_mask = key_mask.expand(*batch, 1, keys).reshape(-1, keys)
    elif len(batch) and all(x is None or x.ndim == 1 or x.shape[0] == 1 for x in parts):
        side = v.reshape(-1, *v.shape[-3:]).movedim(0, -2).flatten(-2)[None]  # one table for all: values side by side
        out = _ROWS(side, None, *parts, **settings)[0].unflatten(-1, (-1, values)).movedim(-2, 0)
        return out.reshape(*batch, *out.shape[-3:])
    out = _ROWS(v.reshape(-1, heads, keys, values), key_mask, *parts, **settings)
    return out.reshape(*batch, *out.shape[-3:])


def few(v: Tensor, length: int, at_least: int = PAYING) -> str:
    """Why blocks would not do; empty where they do, from ``at_least`` scores of one head on."""
    return "" if length * v.shape[-2] >= at_least else "few scores"


def whole(
    v: Tensor, scores: Tensor, key_mask: Tensor | None, *, is_causal: bool, attn_mask: Tensor | None = None,
    dropout: float = 0.0, rectified: Rectified | None = None,
) -> Tensor:  # fmt: skip
    """``attend`` by all scores at once (..., L, S), under any mask, with dropout of weights."""
    mask = masks.visible(scores.shape[-2], v.shape[-2], is_causal=is_causal, key_mask=key_mask, device=v.device)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(scores.dtype)
            scores, attn_mask = scores + attn_mask, attn_mask > float("-inf")
        mask = attn_mask if mask is None else attn_mask & mask
    weights = masks.masked_softmax(scores, mask) if rectified is None else rectified.weights(scores, mask)
    if dropout > 0.0:
        weights = drop_weights(weights.expand(*v.shape[:-2], *weights.shape[-2:]), dropout)
    if weights.ndim == 3:  # one table for all sequences: their values side by side in a single product per head
        return torch.einsum("hls,...hse->...hle", weights, v)
    return weights @ v


def _four(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """(..., H, m, n) as (B, H, m, n), or (1, H, m, n) where there is one for all."""
    if x.ndim == 3:
        return x[None]
    return x.expand(*batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def _plain(
    v: Tensor, key_mask: Tensor | None, *parts: Tensor | None, is_causal: bool, rectified: Rectified | None
) -> Tensor:
    scores, visible = Scores(*parts).whole(v.shape[-2]), None if key_mask is None else key_mask[:, None]
    return whole(v, scores, visible, is_causal=is_causal, rectified=rectified)


def _blocks(
    v: Tensor, scores: Scores, key_mask: Tensor | None, is_causal: bool, spaces: int
) -> Iterator[tuple[Block, tuple[Tensor, ...]]]:
    """All blocks, each with so many ``spaces`` for its scores, in memory that all share."""
    (batch, heads, keys), length = v.shape[:3], scores.length()
    size, shift = min(ROWS, length), keys - length
    shared = any(x is not None and x.ndim > 1 and x.shape[1] != heads for x in scores)
    count = 1 if shared else min(max(BLOCK // (size * keys), 1), heads)
    memory = v.new_empty(spaces, count * size * keys)
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    most = v.new_full((size, size), float("inf")).masked_fill_(later, float("-inf")) if is_causal else later
    for b in range(batch):
        first, end, masked = (0, keys, None) if key_mask is None else _span(key_mask[b])
        start = length if first == end else max(first - shift, 0) if is_causal else 0
        for h in chunks_of(count, heads):
            for i in range(start, length, size):
                j = min(i + size, length)
                last = min(end, j + shift) if is_causal else end
                edge = max(last - i - shift, 0) if is_causal else 0  # keys from the first query's own on
                row = None if masked is None else masked[first:last]
                sizes = h.stop - h.start, j - i, last - first
                space = memory[:, : sizes[0] * sizes[1] * sizes[2]].view(spaces, *sizes).unbind()
                yield (
                    Block(b, h, slice(i, j), slice(first, last), row, most[: j - i, :edge] if edge > 1 else None),
                    space,
                )


def _span(visible: Tensor) -> tuple[int, int, Tensor | None]:
    """The first visible key, the end of the last, and the masked between them if there are any."""
    positions = visible.nonzero()[:, 0]
    if len(positions) == 0:
        return 0, 0, None
    first, end = int(positions[0]), int(positions[-1]) + 1
    return first, end, None if len(positions) == end - first else ~visible


def _scores(part: Scores, block: Block, out: Tensor) -> Tensor:
    """The scores of a block, minus infinity where masked: in ``out``, or as they are in a table."""
    hidden, share = block.masked is not None or block.most is not None, part.share
    if part.R is not None and part.Q is None and part.X is None and share is None and not hidden:
        return part.R
    filled = 0.0
    if part.R is not None:
        out.copy_(part.R) if share is None else torch.mul(part.R, share[:, None, None], out=out)
        filled = 1.0
    if part.X is not None and part.Y is not None:
        outer = (part.X[..., :, None] * part.Y[..., None, :]).flatten(-2)[..., block.keys]
        out.add_(outer) if filled else out.copy_(outer)
        filled = 1.0
    if part.Q is not None and part.K is not None:
        torch.baddbmm(out, part.Q, part.K.mT, beta=filled, out=out)
    if block.masked is not None:
        out.masked_fill_(block.masked, float("-inf"))
    if block.most is not None:
        edge = out[..., max(out.shape[-1] - block.most.shape[1], 0) :]
        torch.minimum(edge, block.most[:, block.most.shape[1] - edge.shape[-1] :], out=edge)
    return out


def _forward(
    v: Tensor, key_mask: Tensor | None, *parts: Tensor | None, is_causal: bool, rectified: Rectified | None, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    scores = Scores(*parts)
    out = v.new_zeros(*v.shape[:2], scores.length(), v.shape[3])
    sums = None if rectified is None or rectified.eps is None else torch.zeros_like(out[..., :1])
    for block, (space,) in _blocks(v, scores, key_mask, is_causal, 1):
        b, h, rows, keys = block[:4]
        weights = _scores(scores.of(b, h, rows, keys), block, space)
        if rectified is None:
            weights = torch.softmax(weights, -1, out=space)
        else:
            weights = torch.clamp(weights, min=0.0, out=space)
            weights = weights.square_() if rectified.power == 2 else weights
        torch.bmm(weights, v[b, h, keys], out=out[b, h, rows])
        if sums is not None:
            torch.sum(weights, -1, keepdim=True, out=sums[b, h, rows])
    if rectified is None or sums is None:
        return out, ()
    divisors = rectified.divisors(sums)
    return out.div_(divisors), (divisors,)


def _backward(
    inputs: Tensors, outputs: Tensors, saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *,
    is_causal: bool, rectified: Rectified | None,
) -> Tensors:  # fmt: skip
    (v, key_mask, *parts), (g,) = inputs, gradients
    assert v is not None
    scores, g = Scores(*parts), g / saved[0] if saved else g.contiguous()
    d_parts = [torch.zeros_like(x) if x is not None and x.requires_grad else None for x in parts]
    dv, turned = v.mT.new_zeros(v.mT.shape).mT if v.requires_grad else None, g.mT.contiguous()  # channel by channel
    mean = torch.linalg.vecdot(g, outputs[0])[..., None] if saved or rectified is None else None
    for block, (space, slopes) in _blocks(v, scores, key_mask, is_causal, 2):
        b, h, rows, keys = block[:4]
        part = scores.of(b, h, rows, keys)
        weights = _scores(part, block, space)
        slopes = torch.bmm(g[b, h, rows], v[b, h, keys].mT, out=slopes)
        if mean is not None:
            slopes.sub_(mean[b, h, rows])
        if rectified is None:
            slopes.mul_(weights := torch.softmax(weights, -1, out=space))
        else:
            rectified.slopes_(slopes, weights := torch.clamp(weights, min=0.0, out=space))
        if dv is not None:
            dv.mT[b, h, :, keys].baddbmm_(turned[b, h, :, rows], weights)
        spread(slopes, part, Scores(*d_parts).of(b, h, rows, keys), keys)
    return dv, None, *d_parts


_FAST = Fast(_forward, _backward)
_ROWS = Operation(_plain, cpu=_FAST, cuda=_FAST)
