"""Computes softmax attention tile by tile: some queries against all keys that they see, with their scores in cache.

A family says which tiles there are (``tiling.py``). The engine flattens heads, loops over groups of heads and tiles,
applies key masks, writes outputs in place and adds gradients where they belong. The weights of a tile are computed
again in the backward pass. They are torch's exact softmax, and a tile holds all keys of its queries, so that nothing is
rescaled: the error is that of the plain definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from fast_attention.engine.blocks import pad_length
from fast_attention.engine.tiling import Bias, Tile, Tiling
from fast_attention.engine.workspace import Workspace

SCORES = 2**18  # of a tile: 1 MiB in float32, what two cores keep in their second-level caches


def heads_together(scores: int) -> int:
    """Heads whose ``scores`` each make a tile; two at least, one for each core."""
    return max(SCORES // scores, 2)


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
    tiling: Tiling,
    *,
    scale: float,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(scale q k^T + bias) v`` over the keys of each tile; a query that sees nothing gets zeros."""
    out, work = q.new_empty(*q.shape[:-1], v.shape[-1]), Workspace(q)
    visible, flat = _visible(key_mask, k, tiling.block), out.view(-1, *out.shape[-2:])
    q, k, v = flatten(q), flatten(k, tiling.block), flatten(v, tiling.block)
    k_memory, v_memory = partial(work, "k"), partial(work, "v")
    for tile, group, masked in _tiles(tiling, q.shape[0], visible):
        keys, values = tile.keys.read(k[group], k_memory), tile.keys.read(v[group], v_memory)
        rows = tile.queries.read(flat[group])
        written = rows if rows.is_contiguous() else work("out", *rows.shape)
        P = weights(tile.queries.read(q[group]), keys, tile.bias, masked, scale=scale, work=work)
        torch.bmm(P, values, out=written)
        if written is not rows:
            rows.copy_(written)
    return out


def gradients(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
    grad_out: Float[Tensor, "*batch length values"],
    tiling: Tiling,
    *,
    scale: float,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``attend`` for queries, keys and values; those of keys and values are added to ``start``.

    With ``P`` the weights, ``dV = P^T dO``, ``dS = P (dP - sum_j P dP)`` where ``dP = dO V^T``, ``dQ = scale dS K`` and
    ``dK = scale dS^T Q``.
    """
    work, block, (q_shape, k_shape, v_shape) = Workspace(q), tiling.block, (q.shape, k.shape, v.shape)
    visible = _visible(key_mask, k, block)
    q, k, v, grad_out = flatten(q), flatten(k, block), flatten(v, block), flatten(grad_out)
    dq = q.new_empty(q.shape)
    dk, dv = (x.new_zeros(x.shape) for x in (k, v)) if start is None else (flatten(x, block) for x in start)
    k_memory, v_memory = partial(work, "k"), partial(work, "v")
    for tile, group, masked in _tiles(tiling, q.shape[0], visible):
        queries, grad = tile.queries.read(q[group]), tile.queries.read(grad_out[group])
        keys, values = tile.keys.read(k[group], k_memory), tile.keys.read(v[group], v_memory)
        P = weights(queries, keys, tile.bias, masked, scale=scale, work=work)
        d_values = torch.bmm(P.mT, grad, out=work("dv", *values.shape))
        dS = torch.bmm(grad, values.mT, out=work("dS", *P.shape))
        torch.ops.aten._softmax_backward_data.out(dS, P, -1, P.dtype, grad_input=dS)
        rows, d_keys = tile.queries.read(dq[group]), work("dk", *keys.shape)
        written = rows if rows.is_contiguous() else work("dq", *rows.shape)
        torch.baddbmm(written, dS, keys, beta=0, alpha=scale, out=written)
        if not (tile.bias is None or isinstance(tile.bias, Tensor)):
            tile.bias.add(dS, queries, written, work, scale=scale)
        torch.baddbmm(d_keys, dS.mT, queries, beta=0, alpha=scale, out=d_keys)
        if written is not rows:
            rows.copy_(written)
        tile.keys.add(d_keys, dk[group], k[group])
        tile.keys.add(d_values, dv[group], v[group])
    dk, dv = (dx.view(*shape[:-2], -1, shape[-1])[..., : shape[-2], :] for dx, shape in ((dk, k_shape), (dv, v_shape)))
    return dq.view(q_shape), dk, dv


def weights(
    q: Float[Tensor, "heads rows width"],
    k: Float[Tensor, "heads span width"],
    bias: Float[Tensor, "*#some span"] | Bias | None,
    masked: Bool[Tensor, "*#some span"] | None,
    *,
    scale: float,
    work: Workspace,
) -> Float[Tensor, "heads rows span"]:
    """``softmax(scale q k^T + bias)`` with 0 where ``masked``, also in rows where everything is."""
    scores = work("scores", *q.shape[:2], k.shape[1])
    if bias is None:
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=scale, out=scores)
    elif isinstance(bias, Tensor):
        torch.baddbmm(bias, q, k.mT, alpha=scale, out=scores)
    else:
        bias.write(q, scores, work, scale=scale)
        torch.baddbmm(scores, q, k.mT, alpha=scale, out=scores)
    if masked is not None:
        scores.masked_fill_(masked, torch.finfo(scores.dtype).min)
    torch.softmax(scores, -1, out=scores)
    return scores if masked is None else scores.masked_fill_(masked, 0.0)


def flatten(x: Tensor, block: int = 0) -> Shaped[Tensor, "heads length E"]:
    """(..., length, E) with one axis of heads and neighbouring numbers in the last; in whole ``block``s contiguous."""
    x = pad_length(x, block) if block else x
    x = x.reshape(-1, *x.shape[-2:])
    return x.contiguous() if block or x.stride(-1) != 1 else x


def _visible(key_mask: Tensor | None, k: Tensor, block: int) -> Bool[Tensor, "heads keys 1"] | None:
    """The key mask of every head, laid out as keys are; None where all keys may be seen."""
    return None if key_mask is None or key_mask.all() else flatten(key_mask.expand(k.shape[:-1])[..., None], block)


def _tiles(tiling: Tiling, heads: int, visible: Tensor | None) -> Iterator[tuple[Tile, slice, Tensor | None]]:
    """Every tile, its group of heads, and what the tile or the key mask hides."""
    for first in range(0, heads, tiling.heads):
        group = slice(first, first + tiling.heads)
        for tile in tiling.tiles(group):
            masked = tile.masked
            if visible is not None:
                unmasked = tile.keys.read(visible[group], visible.new_empty)[..., 0]
                if not unmasked.all():
                    masked = ~unmasked[:, None] if masked is None else masked | ~unmasked[:, None]
            yield tile, group, masked
