"""Local attention in blocks: a query weighs the keys of its block and of neighbouring ones.

The blocks are those of the Reformer's local layers (Kitaev et al. 2020, arXiv 2001.04451).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.biases.bias import Bias
from fast_attention.engine.blocks import smaller
from fast_attention.engine.offsets import Positions
from fast_attention.engine.tracing import symbolic
from fast_attention.gpu import patterns
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse import banded
from fast_attention.mechanisms.sparse.local import TRAITS, NearKeys
from fast_attention.value import at_least


def block_local_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    block_size: int = 64,
    before: int = 1,
    after: int = 1,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the keys of the query's block, of ``before`` blocks before it and of ``after`` blocks after it.

    Blocks are counted from the first key, and query i stands at i + S - L. Causal: later keys are masked and ``after``
    is 0. No block has itself or a wrapped one for its missing neighbour (trax wraps the first round to the last).
    ``bias`` gives what scores gain by offsets j - i, as ``engine.offsets`` has them; the exponentials of ``sinks`` (H,)
    add to normalisers.
    """
    length, keys, open_length = q.shape[-2], k.shape[-2], symbolic()
    if not open_length and _checked(block_size, before, after).covers(length, keys, is_causal=is_causal):
        return softmax_attention(
            q, k, v, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout, scale=scale,
            bias=bias, sinks=sinks,
        )  # fmt: skip
    before, after = smaller(before, keys // block_size), 0 if is_causal else smaller(after, length // block_size + 1)
    return banded.attend(
        q, k, v, left=before, right=after, size=block_size, is_causal=is_causal, key_mask=key_mask,
        attn_mask=attn_mask, dropout=dropout, scale=scale, bias=bias, sinks=sinks,
    )  # fmt: skip


@lru_cache(256)
def _checked(block_size: int, before: int, after: int) -> BlockLocal:
    """The value with these settings, which checks them."""
    return BlockLocal(block_size, before, after)


@dataclass(frozen=True, repr=False)
class BlockLocal(NearKeys):
    """Neighbouring blocks: a query sees its own block, ``before`` blocks before it and ``after`` blocks after it.

    Args:
        block_size: Tokens per block.
        before: Blocks seen before the own one.
        after: Blocks seen after the own one; none with is_causal=True (the Reformer's local layers have 1 and 0).
        scale: Factor on the dot products; None means 1/sqrt(width).
        bias: What scores gain by the distance of query and key: ``ALiBi()``, ``T5Buckets()`` or ``TransformerXL()``.
        sinks: Whether every head has a learned score more, of no value, that takes weight from all keys (gpt-oss).
    """

    block_size: int = 64
    before: int = 1
    after: int = 1
    scale: float | None = None
    bias: Bias | None = None
    sinks: bool = False

    base_traits = replace(TRAITS, positions="absolute")

    def __post_init__(self) -> None:
        """Check the settings."""
        at_least(self, "block_size", self.block_size, 1)
        at_least(self, "before", self.before, 0)
        at_least(self, "after", self.after, 0)

    @property
    def shares_cache(self) -> bool:  # type: ignore[override]
        """Whether all heads see the same."""
        return self.is_plain

    def covers(self, length: int, keys: int, *, is_causal: bool) -> bool:
        """Whether every one of ``length`` queries sees all ``keys``, as far as it may."""
        final = (keys - 1) // self.block_size
        return self.before >= final and (is_causal or self.after >= final - (keys - length) // self.block_size)

    def leaving(self, keys: int) -> int:
        """How many of the first of ``keys`` tokens, whole blocks, no later token sees.

        A state begins where a block begins, so that blocks are counted from its first key.
        """
        return max(keys // self.block_size - self.before, 0) * self.block_size

    def key_range(self, first: int, end: int) -> tuple[int, int]:
        """The borders of the blocks that queries ``first`` to ``end - 1`` see."""
        size = self.block_size
        return (first // size - self.before) * size, ((end - 1) // size + self.after + 1) * size

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any,
        *, is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Softmax over the neighbouring blocks under any mask."""
        q, bias = self.positions(q, w, self.scale)
        return block_local_attention(
            q, k, v, block_size=self.block_size, before=self.before, after=self.after, is_causal=is_causal,
            key_mask=key_mask, attn_mask=attn_mask, dropout=dropout, scale=self.scale, bias=bias,
            sinks=self.sinks_of(w),
        )  # fmt: skip

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """By FlexAttention, on a GPU; blocks are counted from every sequence's first token."""
        if not self.is_plain:
            return None
        after = patterns.CAUSAL if is_causal else self.after
        return patterns.attend_packed(
            q, k, v, lengths, self.before, after, key_mask, scale=self.scale, size=self.block_size
        )
