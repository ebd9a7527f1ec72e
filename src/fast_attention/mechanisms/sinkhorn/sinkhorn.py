"""Sparse Sinkhorn attention (Tay et al. 2020): blocks of keys are sorted softly, so that few of them need be seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch, masks
from fast_attention.engine.blocks import join, split
from fast_attention.engine.fused import fused_attention
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.sinkhorn.fast import own_and_sorted
from fast_attention.mechanisms.sinkhorn.sorting import SortNet, block_permutation, sort_blocks, sort_net, split_keys
from fast_attention.value import at_least


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
    length = q.shape[-2]
    lead = (k.shape[-2] - length) % block_size
    first = (k.shape[-2] - length) // block_size
    keys, values, visible = split_keys(k, v, key_mask, block_size)
    S = block_permutation(keys, visible, P, num_iterations=num_iterations, temperature=temperature, is_causal=is_causal)
    queries = split(F.pad(q, (0, 0, lead, 0)), block_size)
    numbers: Any = {"first": first, "is_causal": is_causal, "any_masked": key_mask is not None, "length": k.shape[-2]}
    out = own_and_sorted(queries, S[..., first:, :], keys, values, visible, **numbers)
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
    keys, values, visible = split_keys(k, v, key_mask, block_size)
    S = block_permutation(keys, visible, P, num_iterations=num_iterations, temperature=temperature, is_causal=False)
    some = visible.any(-1)
    wanted = torch.arange(1, budget + 1, device=q.device)[:, None]
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
