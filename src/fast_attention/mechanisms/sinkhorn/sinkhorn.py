"""Sparse Sinkhorn attention (Tay et al. 2020): blocks of keys are sorted softly, so that few of them need be seen.

Sorted keys and values stand behind the keys and values themselves, so that a block of queries reads two ranges of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks, tiles, trace
from fast_attention.engine.blocks import join, split
from fast_attention.engine.fused import fused_attention
from fast_attention.engine.heads import short
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.operation import Operation, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.sinkhorn.sorting import SortNet, block_permutation, sort_blocks, sort_net, split_keys
from fast_attention.traits import BLOCKS, FUSED
from fast_attention.value import at_least


def visible_softmax(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: None = None,
    numbers: None = None,
    vectors: None = None,
    sinks: None = None,
    *,
    size: int,
    start: int,
    is_causal: bool,
    scale: float,
) -> Float[Tensor, "*batch length values"]:
    """Softmax of blocks of queries, the first of which is the block of keys at ``start``, over their own block and a
    sorted one each: sorted blocks, as many as those of queries, stand behind all keys.
    """
    sorted_start = k.shape[-2] - q.shape[-2]
    blocks = q.unflatten(-2, (-1, size))
    sides = [
        torch.cat([
            x[..., sorted_start:, :].unflatten(-2, (-1, size)),
            x[..., start:sorted_start, :].unflatten(-2, (-1, size)),
        ], -2) for x in (k, v)
    ]  # fmt: skip
    mask = None
    if is_causal:
        mask = F.pad(masks.causal(size, size, q.device), (size, 0), value=True)
        if start == 0:  # nothing is before the first block
            mask = mask.expand(blocks.shape[-3], -1, -1).clone()
            mask[0, :, :size] = False
    every, keys, values = (x.reshape(-1, *x.shape[-3:]) for x in (blocks, *sides))  # blocks stand for heads
    return fused_attention(every, keys, values, mask).reshape(*q.shape[:-1], v.shape[-1])


@lru_cache(256)
def _tiles_of_own_and_sorted(length: int, keys: int, size: int, start: int, is_causal: bool) -> tiles.Plan:
    step = -(-size // -(-size // tiles.MOST_ROWS))
    rows, own, other = list[list[int]](), list[list[int]](), keys - length
    for block in range(0, length, size):
        first = len(own)
        own.append([start + block, start + block + size, -tiles.FAR, start if is_causal else tiles.FAR, 0, 1])
        if not is_causal or start + block > 0:  # nothing is before the first block
            own.append([other + block, other + block + size, -tiles.FAR, tiles.FAR, 0, 1])
        rows += [[row, min(row + step, block + size), first, len(own)] for row in range(block, block + size, step)]
    return tiles.Plan(torch.tensor([[rows]], dtype=torch.int32), torch.tensor(own, dtype=torch.int32))


def _short(q: Tensor, k: Tensor, *others: Any, **settings: Any) -> str:
    own = k[..., : k.shape[-2] - q.shape[-2], :]  # behind them are the sorted ones
    return "many short sequences" if short(own) else ""


_visible_softmax = tiles.operation(
    visible_softmax,
    lambda q, k, **settings: _tiles_of_own_and_sorted(q.shape[-2], k.shape[-2], **settings),
    path="products over own and sorted block",
    name="softmax in tiles over own and sorted block",
    why="no sorted position is masked or padded",
    sizes=lambda *tensors, size, **settings: {"block": size},
    serves=_short,
)


def masked_softmax(
    q: Tensor, S: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, first: int, is_causal: bool, first_row: int
) -> Tensor:
    """Softmax of blocks of queries where only a fraction of a sorted key may be ``visible`` (..., blocks, size).

    Queries are whole blocks, or those from ``first_row`` on of one block.
    """
    rows, size, best = q.shape[-2], k.shape[-2], sort_blocks(S, k, v, visible)
    unsorted = visible[..., first:, None, :]
    if is_causal:
        unsorted = unsorted & masks.causal(size, size, q.device)[first_row : first_row + rows]
    unsorted = unsorted.expand(*best.visible.shape[:-1], rows, size)
    mask = torch.cat([best.visible[..., None, :].expand(unsorted.shape), unsorted], -1)
    scores = q @ torch.cat([best.k, k[..., first:, :, :]], -2).mT * q.shape[-1] ** -0.5
    scores = scores + F.pad(best.log_fraction, (0, size))[..., None, :]
    return masks.masked_softmax(scores, mask) @ torch.cat([best.v, v[..., first:, :, :]], -2)


def own_and_sorted_softmax(
    q: Tensor, S: Tensor, k: Tensor, v: Tensor, visible: Tensor, *,
    first: int, is_causal: bool, any_masked: bool, length: int, first_row: int,
) -> Tensor:  # fmt: skip
    """Softmax of blocks of queries, the last ones from ``first`` on, over own and sorted keys, ``length`` in all.

    With ``first_row`` queries of one block alone, which are not its first.
    """
    size = q.shape[-2]
    if not symbolic() and not any_masked and first_row == 0 and (is_causal or length % size == 0):  # all are visible
        keys, values = (
            torch.cat([x.flatten(-3, -2), (S @ x.flatten(-2)).unflatten(-1, x.shape[-2:]).flatten(-3, -2)], -2)
            for x in (k, v)
        )
        settings: Any = {"size": size, "start": first * size, "is_causal": is_causal, "scale": q.shape[-1] ** -0.5}
        out = _visible_softmax(q.flatten(-3, -2), keys, values, *[None] * 4, **settings)
        return out.unflatten(-2, q.shape[-3:-1])
    why = "masked or padded positions are sorted too"
    trace.record("products over own and sorted block", why, block=k.shape[-2])
    return masked_softmax(q, S, k, v, visible, first=first, is_causal=is_causal, first_row=first_row)


own_and_sorted = Operation(own_and_sorted_softmax, empty=like_queries)


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
    first_row = (k.shape[-2] - length) % block_size
    first = (k.shape[-2] - length) // block_size
    keys, values, visible = split_keys(k, v, key_mask, block_size)
    S = block_permutation(keys, visible, P, num_iterations=num_iterations, temperature=temperature, is_causal=is_causal)
    numbers: Any = {"first": first, "is_causal": is_causal, "any_masked": key_mask is not None, "length": k.shape[-2]}
    arguments = S[..., first:, :], keys, values, visible
    if (
        short(q) and 0 < first_row <= block_size - length
    ):  # steps of many sequences: a block of rows for each is not made
        return own_and_sorted(q[..., None, :, :], *arguments, first_row=first_row, **numbers)[..., 0, :, :]
    queries = split(F.pad(q, (0, 0, first_row, 0)), block_size)
    out = own_and_sorted(queries, *arguments, first_row=0, **numbers)
    return join(out, length + first_row)[..., first_row:, :]


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

    Blocks are sorted as in ``sinkhorn_attention``. Blocks without a visible token are not counted.

    Args:
        q: Queries (..., L, E).
        k: Keys (..., S, E).
        v: Values (..., S, Ev).
        P: Learned weights (heads, E, blocks), which score where a block goes.
        block_size: Tokens in a block.
        budget: How many sorted blocks every query sees.
        num_iterations: Rounds of Sinkhorn's normalisation.
        temperature: Divides the scores of the sorting.
        key_mask: (..., S), True where a key is visible.
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
        trace.record("fused softmax over the first sorted blocks", why, block=block_size, budget=budget)
        saved, content = (
            x.flatten(-3, -2)[..., : min(budget, keys.shape[-3]) * block_size, :] for x in (best.k, best.v)
        )
        return fused_attention(q, saved, content)
    why = "masked or padded positions are sorted too"
    trace.record("products over the first sorted blocks", why, block=block_size, budget=budget)
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
        complexity_exponent=2.0,
        gpu=BLOCKS,
        causal=True,
        padding=True,
        memory="growing",
        positions="absolute",
        needs_max_len=True,
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

    traits = replace(
        Sinkhorn.traits,
        formula="softmax(q (S K)_cut^T / sqrt(d)) (S V)_cut, S = sinkhorn(sum(K) P)",
        cost="n c b d + n^2 / b^2",
        gpu=FUSED,
        causal=False,
        cross=True,
        memory=None,
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
