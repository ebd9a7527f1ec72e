"""Softmax over every block of keys beside the block sorted to its position, in tiles.

A head's keys and values are sorted some blocks at a time into memory that is used again, so that nothing as large as
the sequence is made but outputs and gradients. Where causal, only blocks before the tile's end are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch, masks, tiled
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.fused import fused_attention, open_attention
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.tiling import Memory, Span, Tile, Tiling, bias_of
from fast_attention.engine.tracing import exporting, symbolic
from fast_attention.mechanisms.sinkhorn.sorting import sort_blocks

BLOCKS, EARLIER = 128, 64  # of a tile, and where later blocks are left out: with fewer, the product that sorts is slow


def plain_softmax(q: Tensor, S: Tensor, k: Tensor, v: Tensor, *, first: int, is_causal: bool) -> Tensor:
    """Softmax of blocks of queries over own and sorted keys, all of them visible; arguments as in ``fast.py``."""
    sides = [torch.cat([(S @ x.flatten(-2)).unflatten(-1, x.shape[-2:]), x[..., first:, :, :]], -2) for x in (k, v)]
    mask = None
    if is_causal:
        size = q.shape[-2]
        mask = F.pad(masks.causal(size, size, q.device), (size, 0), value=True)
        if first == 0:  # nothing is before the first block
            mask = mask.expand(q.shape[-3], -1, -1).clone()
            mask[0, :, :size] = False
    if exporting():  # the fused kernels ask how strides compare
        return open_attention(q, sides[0], sides[1], mask)
    keys, values = (x.flatten(0, -4) for x in sides)  # blocks stand where the fused kernels expect heads
    return fused_attention(q.flatten(0, -4), keys, values, mask).unflatten(0, q.shape[:-3])


def masked_softmax(
    q: Tensor, S: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, first: int, is_causal: bool
) -> Tensor:
    """Softmax of blocks of queries where only a fraction of a sorted key may be ``visible`` (..., blocks, size)."""
    size, best = q.shape[-2], sort_blocks(S, k, v, visible)
    unsorted = visible[..., first:, None, :]
    if is_causal:
        unsorted = unsorted & masks.causal(size, size, q.device)
    unsorted = unsorted.expand(*best.visible.shape[:-1], size, size)
    mask = torch.cat([best.visible[..., None, :].expand(unsorted.shape), unsorted], -1)
    scores = q @ torch.cat([best.k, k[..., first:, :, :]], -2).mT * q.shape[-1] ** -0.5
    scores = scores + F.pad(best.log_fraction, (0, size))[..., None, :]
    return masks.masked_softmax(scores, mask) @ torch.cat([best.v, v[..., first:, :, :]], -2)


@opaque(like_queries)
def own_and_sorted(
    q: Tensor, S: Tensor, k: Tensor, v: Tensor, visible: Tensor, *,
    first: int, is_causal: bool, any_masked: bool, length: int,
) -> Tensor:  # fmt: skip
    """Softmax of blocks of queries, the last ones from ``first`` on, over own and sorted keys, ``length`` in all."""
    if not symbolic() and not any_masked and (is_causal or length % q.shape[-2] == 0):
        return sorted_softmax(q, S, k, v, first=first, is_causal=is_causal)
    why = "masked or padded positions are sorted too"
    dispatch.record("products over own and sorted block", why, block=q.shape[-2])
    return masked_softmax(q, S, k, v, visible, first=first, is_causal=is_causal)


def sorted_softmax(
    q: Float[Tensor, "*batch rows size width"],
    S: Float[Tensor, "*batch rows blocks"],
    k: Float[Tensor, "*batch blocks size width"],
    v: Float[Tensor, "*batch blocks size values"],
    *,
    first: int,
    is_causal: bool,
) -> Float[Tensor, "*batch rows size values"]:
    """Softmax of blocks of queries, the last ones from ``first`` on, over own and sorted keys, all of them visible."""
    why = dispatch.obstacle(q, k, v)
    if why:
        dispatch.record("products over own and sorted block", why, block=q.shape[-2])
        return plain_softmax(q, S, k, v, first=first, is_causal=is_causal)
    why = "no sorted position is masked or padded"
    dispatch.record("softmax in tiles over own and sorted block", why, block=q.shape[-2])
    return _tiled(q, S, k, v, first=first, is_causal=is_causal)


class _Keys(NamedTuple):
    """What is sorted to every block of queries, and beside it the block itself."""

    size: int
    sort: Float[Tensor, "rows reach"]  # weights of the blocks that may be sorted to them
    unsorted: slice
    d_sort: Float[Tensor, "rows reach"] | None = None

    def read(self, x: Tensor, memory: Memory) -> Float[Tensor, "rows span E"]:
        """Keys or values, 2 ``size`` of them."""
        blocks = x.view(-1, self.size * x.shape[-1])
        both = memory(self.sort.shape[0], 2 * self.size, x.shape[-1])
        torch.mm(self.sort, blocks[: self.sort.shape[1]], out=both[:, : self.size].flatten(1))
        both[:, self.size :].copy_(blocks[self.unsorted].view(-1, self.size, x.shape[-1]))
        return both

    def add(self, gradient: Tensor, dx: Tensor, x: Tensor) -> None:
        """Add to the gradients of a head's blocks and of its permutation."""
        blocks, d_blocks = (y.view(-1, self.size * x.shape[-1]) for y in (x, dx))
        reach, d_sorted = self.sort.shape[1], gradient[:, : self.size].flatten(1)
        assert self.d_sort is not None
        self.d_sort.addmm_(d_sorted, blocks[:reach].mT)
        d_blocks[:reach].addmm_(self.sort.mT, d_sorted)
        d_blocks[self.unsorted].view(-1, self.size, x.shape[-1]).add_(gradient[:, self.size :])


def _tiling(q: Tensor, S: Tensor, dS: Tensor | None, *, first: int, is_causal: bool) -> Tiling:
    """Tiles of many blocks of one head."""
    count, size = q.shape[-3:-1]
    S = S.contiguous().view(-1, *S.shape[-2:])
    dS = None if dS is None else dS.view(-1, *dS.shape[-2:])
    number = EARLIER if is_causal else BLOCKS
    bias = from_first = None
    if is_causal:
        visible = F.pad(masks.causal(size, size, q.device), (size, 0), value=True)
        bias, visible = bias_of(visible, q.dtype), visible.repeat(min(number, count), 1, 1)
        visible[0, :, :size] = False  # nothing is before the first block
        from_first = bias_of(visible, q.dtype)

    def tiles(head: slice) -> Iterator[Tile]:
        for start in range(0, count, number):
            stop = min(start + number, count)
            rows, reach = (head.start, slice(start, stop)), first + stop if is_causal else S.shape[-1]
            keys = _Keys(size, S[rows][:, :reach], slice(first + start, first + stop))
            keys = keys if dS is None else keys._replace(d_sort=dS[rows][:, :reach])
            queries = Span(start * size, size, stop - start, size)
            yield Tile(queries, keys, from_first if first + start == 0 else bias)

    return Tiling(1, tiles, size)


def _forward(
    q: Tensor, S: Tensor, k: Tensor, v: Tensor, *, keep: bool, first: int, is_causal: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    tiling = _tiling(q, S, None, first=first, is_causal=is_causal)
    queries, keys, values = (x.flatten(-3, -2) for x in (q, k, v))
    out = tiled.attend(queries, keys, values, None, tiling, scale=q.shape[-1] ** -0.5)
    return out.view(*q.shape[:-1], v.shape[-1]), ()


def _backward(
    inputs: tuple[Tensor, ...], outputs: Tensors, kept: Tensors, gradient: tuple[Tensor, ...],
    *, first: int, is_causal: bool,
) -> Tensors:  # fmt: skip
    q, S, k, v = inputs
    dS = S.new_zeros(S.shape)
    tiling = _tiling(q, S, dS, first=first, is_causal=is_causal)
    queries, keys, values, grad_out = (x.flatten(-3, -2) for x in (q, k, v, gradient[0]))
    dq, dk, dv = tiled.gradients(queries, keys, values, None, grad_out, tiling, scale=q.shape[-1] ** -0.5)
    return dq.view(q.shape), dS, dk.view(k.shape), dv.view(v.shape)


_tiled = CustomGradient(plain_softmax, _forward, _backward)
