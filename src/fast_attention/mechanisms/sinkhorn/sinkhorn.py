"""Sparse Sinkhorn attention (Tay et al. 2020): blocks of keys are sorted softly, so that few of them need be seen.

Softmax over every block of keys beside the block sorted to its position, in tiles.

A head's keys and values are sorted some blocks at a time into memory that is used again, so that nothing as large as
the sequence is made but outputs and gradients. Where causal, only blocks before the tile's end are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch, masks, tiled
from fast_attention.engine.blocks import join, split
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.fused import fused_attention, open_attention
from fast_attention.engine.heads import short
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tiled import Memory, Span, Tile, Tiling, bias_of
from fast_attention.engine.tracing import exporting, symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.sinkhorn.sorting import SortNet, block_permutation, sort_blocks, sort_net, split_keys
from fast_attention.value import at_least

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
    q: Tensor, S: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, first: int, is_causal: bool, lead: int
) -> Tensor:
    """Softmax of blocks of queries where only a fraction of a sorted key may be ``visible`` (..., blocks, size).

    Queries are whole blocks, or those from ``lead`` on of one block.
    """
    rows, size, best = q.shape[-2], k.shape[-2], sort_blocks(S, k, v, visible)
    unsorted = visible[..., first:, None, :]
    if is_causal:
        unsorted = unsorted & masks.causal(size, size, q.device)[lead : lead + rows]
    unsorted = unsorted.expand(*best.visible.shape[:-1], rows, size)
    mask = torch.cat([best.visible[..., None, :].expand(unsorted.shape), unsorted], -1)
    scores = q @ torch.cat([best.k, k[..., first:, :, :]], -2).mT * q.shape[-1] ** -0.5
    scores = scores + F.pad(best.log_fraction, (0, size))[..., None, :]
    return masks.masked_softmax(scores, mask) @ torch.cat([best.v, v[..., first:, :, :]], -2)


@opaque(like_queries)
def own_and_sorted(
    q: Tensor, S: Tensor, k: Tensor, v: Tensor, visible: Tensor, *,
    first: int, is_causal: bool, any_masked: bool, length: int, lead: int,
) -> Tensor:  # fmt: skip
    """Softmax of blocks of queries, the last ones from ``first`` on, over own and sorted keys, ``length`` in all.

    With ``lead`` queries of one block alone, which are not its first.
    """
    if not symbolic() and not any_masked and lead == 0 and (is_causal or length % q.shape[-2] == 0):
        return sorted_softmax(q, S, k, v, first=first, is_causal=is_causal)
    why = "masked or padded positions are sorted too"
    dispatch.record("products over own and sorted block", why, block=k.shape[-2])
    return masked_softmax(q, S, k, v, visible, first=first, is_causal=is_causal, lead=lead)


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
    if not why and short(k.flatten(-3, -2)):
        why = "many short sequences"
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


def _size(k: Tensor, block_size: int) -> int:
    """Tokens of a block; of many short sequences no more than they have, which is no padding of each to a block."""
    return min(block_size, k.shape[-2]) if short(k) else block_size


@in_float32
def sinkhorn_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    P: Float[Tensor, "heads width blocks"],
    *,
    block_size: int,
    num_iterations: int = 8,
    temperature: float = 0.75,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of every query to its own block and to the block sorted to its position (arXiv 2002.11296).

    The blocks' summaries ``x_i`` (the sum of a block's visible keys) give scores ``R = x P / temperature``; Sinkhorn's
    rounds make of them a soft permutation S over the blocks that hold a visible token; the sorted keys and values
    are ``S K`` and ``S V``, block by block. A position of a sorted block into which also masked tokens are sorted holds
    the mean of the visible ones and weighs as much as their fraction.

    Causal: ``x_i`` is the mean of the visible keys up to the first of block i, S is a softmax over the *earlier*
    blocks alone (a column's sum would tell a block what later ones ask for), and block 0 sees itself only. With
    fewer queries than keys the queries are the last ones, as in decoding.
    """
    length, block_size = q.shape[-2], _size(k, block_size)
    lead = (k.shape[-2] - length) % block_size
    first = (k.shape[-2] - length) // block_size
    keys, values, visible = split_keys(k, v, key_mask, block_size)
    S = block_permutation(keys, visible, P, num_iterations=num_iterations, temperature=temperature, is_causal=is_causal)
    numbers: Any = {"first": first, "is_causal": is_causal, "any_masked": key_mask is not None, "length": k.shape[-2]}
    arguments = S[..., first:, :], keys, values, visible
    if short(q) and 0 < lead <= block_size - length:  # steps of many sequences: a block of rows for each is not made
        return own_and_sorted(q[..., None, :, :], *arguments, lead=lead, **numbers)[..., 0, :, :]
    queries = split(F.pad(q, (0, 0, lead, 0)), block_size)
    out = own_and_sorted(queries, *arguments, lead=0, **numbers)
    return join(out, length + lead)[..., lead:, :]


@in_float32
def sortcut_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    P: Float[Tensor, "heads width blocks"],
    *,
    block_size: int,
    budget: int,
    num_iterations: int = 8,
    temperature: float = 0.75,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention of every query to the first ``budget`` sorted blocks (SortCut, arXiv 2002.11296).

    Sorted as in ``sinkhorn_attention``; blocks without a visible token are not counted.
    """
    block_size = _size(k, block_size)
    keys, values, visible = split_keys(k, v, key_mask, block_size)
    S = block_permutation(keys, visible, P, num_iterations=num_iterations, temperature=temperature, is_causal=False)
    some = visible.any(-1)
    rows = min(budget, keys.shape[-3]) if short(k) else budget
    wanted = torch.arange(1, rows + 1, device=q.device)[:, None]
    S = ((some.cumsum(-1)[..., None, :] == wanted) & some[..., None, :]).to(S.dtype) @ S
    best = sort_blocks(S, keys, values, visible)
    if not symbolic() and key_mask is None and k.shape[-2] % block_size == 0:
        why = "no sorted position is masked or padded"
        dispatch.record("fused softmax over the kept blocks", why, block=block_size, budget=budget)
        kept, content = (
            x.flatten(-3, -2)[..., : min(budget, keys.shape[-3]) * block_size, :] for x in (best.k, best.v)
        )
        return fused_attention(q, kept, content)
    why = "masked or padded positions are sorted too"
    dispatch.record("products over the kept blocks", why, block=block_size, budget=budget)
    scores = q @ best.k.flatten(-3, -2).mT * q.shape[-1] ** -0.5 + best.log_fraction.flatten(-2)[..., None, :]
    weights = masks.masked_softmax(scores, best.visible.flatten(-2)[..., None, :])
    return weights @ best.v.flatten(-3, -2)


@dataclass(frozen=True, repr=False)
class _Sorting(Attention[SortNet, Any]):
    block_size: int = 64
    num_iterations: int = 8
    temperature: float = 0.75

    def __post_init__(self) -> None:
        at_least(self, "block_size", self.block_size, 1)
        at_least(self, "num_iterations", self.num_iterations, 0)
        at_least(self, "temperature", self.temperature, 1e-6)

    def weights(self, shape: Shape) -> SortNet:
        """A linear sorting network per head."""
        return sort_net(shape.heads, shape.head_dim, shape.max_len, self.block_size)


@dataclass(frozen=True, repr=False)
class Sinkhorn(_Sorting):
    """Every query sees its own block and one block sorted to its position by a learned, differentiable sorting.

    Deterministic: the Gumbel noise with which the paper trains its sorting network is left out, as at evaluation.
    Sorting mixes all pairs of blocks, which is quadratic with a factor 1/b; blocks of about sqrt(n) balance the two.

    Args:
        block_size: Tokens per block.
        num_iterations: Rounds of Sinkhorn's balancing; 0 makes a plain softmax over blocks of it. Without effect when
            causal, where a softmax over earlier blocks is all that does not see the future.
        temperature: Divides the sorting scores; smaller sorts harder.
    """

    traits = Traits(
        paper="Tay et al. 2020, arXiv 2002.11296",
        formula="softmax(q [(S K)_i, K_i]^T / sqrt(d)) [(S V)_i, V_i] for block i, S = sinkhorn(sum(K) P)",
        cost="n b d + n^2 d / b",
        order=2.0,
        causal=True,
        padding=True,
        memory="growing",
        positions="absolute",
        bounded=True,
        learned=True,
    )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: SortNet, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """Own block and sorted block."""
        self.within(k.shape[-2], w.block_of.shape[0])
        return sinkhorn_attention(
            q, k, v, w.P, block_size=self.block_size, num_iterations=self.num_iterations, temperature=self.temperature,
            is_causal=is_causal, key_mask=key_mask,
        )  # fmt: skip

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: SortNet, state: KVCache | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Append the new tokens to all keys and values so far and attend from their blocks."""
        state = append(state, k, v, key_mask)
        return self.attend(q, state.k, state.v, w, is_causal=True, key_mask=state.visible), state


@dataclass(frozen=True, repr=False)
class SortCut(_Sorting):
    """Every query sees the same few blocks: the first that a learned sorting brings forward. Not causal.

    Args:
        block_size, num_iterations, temperature: As in ``Sinkhorn``.
        budget: Sorted blocks that are kept.
    """

    budget: int = 2

    traits = Traits(
        paper="Tay et al. 2020, arXiv 2002.11296",
        formula="softmax(q (S K)_cut^T / sqrt(d)) (S V)_cut, S = sinkhorn(sum(K) P)",
        cost="n c b d + n^2 / b^2",
        order=2.0,
        padding=True,
        cross=True,
        positions="absolute",
        bounded=True,
        learned=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "budget", self.budget, 1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: SortNet, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """The first sorted blocks."""
        self.within(k.shape[-2], w.block_of.shape[0])
        return sortcut_attention(
            q, k, v, w.P, block_size=self.block_size, budget=self.budget, num_iterations=self.num_iterations,
            temperature=self.temperature, key_mask=key_mask,
        )  # fmt: skip
