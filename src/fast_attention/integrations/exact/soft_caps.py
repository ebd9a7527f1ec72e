"""Attention with soft-capped scores, ``cap tanh(scores / cap)`` (Gemma 2): in tiles, forwards and backwards.

A tile is a block of queries, of all heads that share keys, and the keys that they may see. Its scores are computed
again in the backward pass, so that the scores of all pairs are never held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import heads, masks
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.precision import in_float32

ROWS = 64  # queries of a tile
SCORES = 2**19  # of a tile at most, where one group of heads has no more


def capped_attention(
    q: Float[Tensor, "batch heads length width"],
    k: Float[Tensor, "batch groups keys width"],
    v: Float[Tensor, "batch groups keys values"],
    *,
    cap: float,
    scale: float | None,
    back: int | None = None,
    ahead: int | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads length values"]:
    """Softmax attention of scores ``cap tanh(scale q k^T / cap)``.

    Args:
        q: Queries, the last of them at the last key unless they see all.
        k: Keys; query head h reads those of head h // (heads / groups).
        v: Values.
        cap: The bound on scores.
        scale: Factor on the dot products; None means 1/sqrt(width).
        back: Earlier keys that a query sees; None: all.
        ahead: Later keys; None: all.
        dropout: Probability with which an attention weight is dropped. The scores of all pairs are then held.
    """
    settings = {"cap": float(cap), "scale": float(q.shape[-1] ** -0.5 if scale is None else scale)}
    if dropout:
        return in_float32(_plain)(q, k, v, back=back, ahead=ahead, dropout=dropout, **settings)
    return _tiled(q, k, v, back=back, ahead=ahead, **settings)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, *, cap: float, scale: float, back: int | None, ahead: int | None,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    k, v = heads.repeated(q.shape[1], k=k, v=v)
    scores = cap * torch.tanh(q @ k.mT * (scale / cap))
    length, keys = scores.shape[-2:]
    visible = masks.band(length, keys - length, 0, left=back, right=ahead, device=q.device)
    return F.dropout(masks.masked_softmax(scores, visible), dropout) @ v


class _Tile(NamedTuple):
    """A block of queries, the keys that some of them see, and what is hidden at both ends of these."""

    rows: slice
    keys: slice
    hidden: tuple[tuple[slice, Bool[Tensor, "rows columns"]], ...]

    def weights(
        self, q: Float[Tensor, "groups heads rows width"], k: Float[Tensor, "groups span width"], cap: float,
        scale: float,
    ) -> tuple[Float[Tensor, "groups rows span"], Float[Tensor, "groups rows span"]]:  # fmt: skip
        """The capped scores over the cap, and softmax weights."""
        scores = torch.bmm(q.flatten(1, 2) * (scale / cap), k.mT).tanh_()
        weights = scores * cap
        by_head = weights.unflatten(1, q.shape[1:3])
        for columns, hidden in self.hidden:
            by_head[..., columns].masked_fill_(hidden, float("-inf"))
        return scores, torch.softmax(weights, -1, out=weights)


def _tiles(length: int, keys: int, back: int | None, ahead: int | None) -> Iterator[_Tile]:
    behind = keys - length
    for first in range(0, length, ROWS):
        last = min(first + ROWS, length)
        low = 0 if back is None else max(first + behind - back, 0)
        high = keys if ahead is None else min(last + behind + ahead, keys)
        distance = torch.arange(low, high) - torch.arange(first + behind, last + behind)[:, None]
        hidden = []
        if back is not None and low + back < last + behind - 1:
            columns = slice(0, last + behind - 1 - back - low)
            hidden.append((columns, distance[:, columns] < -back))
        if ahead is not None and first + behind + ahead < high - 1:
            columns = slice(first + behind + ahead + 1 - low, high - low)
            hidden.append((columns, distance[:, columns] > ahead))
        yield _Tile(slice(first, last), slice(low, high), tuple(hidden))


def _parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (groups, heads, length, width) of all sequences, and keys and values (groups, keys, ...)."""
    groups = k.shape[1]
    return q.unflatten(1, (groups, -1)).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def _together(q: Tensor, tile: _Tile) -> range:
    """The first of the groups of heads that share a tile, in turn."""
    size = q.shape[1] * (tile.rows.stop - tile.rows.start) * (tile.keys.stop - tile.keys.start)
    return range(0, len(q), max(SCORES // size, 1))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, keep: bool, cap: float, scale: float, back: int | None, ahead: int | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    flat = out.unflatten(1, (k.shape[1], -1)).flatten(0, 1)
    q, k, v = _parts(q, k, v)
    for tile in _tiles(q.shape[-2], k.shape[-2], back, ahead):
        turns = _together(q, tile)
        for first in turns:
            group = slice(first, first + turns.step)
            queries = q[group, :, tile.rows]
            _, P = tile.weights(queries, k[group, tile.keys], cap, scale)
            flat[group, :, tile.rows] = torch.bmm(P, v[group, tile.keys]).unflatten(1, queries.shape[1:3])
    return out, ()


def _backward(
    inputs: tuple[Tensor, ...], outputs: Tensors, kept: Tensors, gradient: tuple[Tensor, ...],
    *, cap: float, scale: float, back: int | None, ahead: int | None,
) -> Tensors:  # fmt: skip
    q, k, v = _parts(*inputs)
    grad_out = gradient[0].unflatten(1, (inputs[1].shape[1], -1)).flatten(0, 1)
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for tile in _tiles(q.shape[-2], k.shape[-2], back, ahead):
        turns = _together(q, tile)
        for first in turns:
            group = slice(first, first + turns.step)
            queries, keys, values = q[group, :, tile.rows], k[group, tile.keys], v[group, tile.keys]
            grad = grad_out[group, :, tile.rows].flatten(1, 2)
            tanh, P = tile.weights(queries, keys, cap, scale)
            dv[group, tile.keys] += torch.bmm(P.mT, grad)
            dS = torch.bmm(grad, values.mT)
            torch.ops.aten._softmax_backward_data.out(dS, P, -1, P.dtype, grad_input=dS)
            torch.ops.aten.tanh_backward.grad_input(dS, tanh, grad_input=dS)
            dq[group, :, tile.rows] = torch.bmm(dS, keys).mul_(scale).unflatten(1, queries.shape[1:3])
            dk[group, tile.keys] += torch.bmm(dS.mT, queries.flatten(1, 2)).mul_(scale)
    return dq.view(inputs[0].shape), dk.view(inputs[1].shape), dv.view(inputs[2].shape)


_tiled = in_float32(CustomGradient(_plain, _forward, _backward))
