"""Local attention: a query weighs the keys near it, in a sliding window or in neighbouring blocks.

The sliding window is Longformer's (Beltagy et al. 2020, arXiv 2004.05150) with the ends of FlashAttention's
``window_size=(left, right)``; the blocks are those of the Reformer's local layers (Kitaev et al. 2020, 2001.04451).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch, masks
from fast_attention.engine.blocks import smaller
from fast_attention.engine.kv_cache import KVCache, append, last
from fast_attention.mechanism import MaskedAttention, Traits
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.sparse.banded import banded_softmax, covers_most
from fast_attention.value import at_least

SMALLEST_BLOCK, LARGEST_BLOCK = 64, 128  # of queries that share one slice of keys


def local_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    window: int | tuple[int, int] = 128,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    block: int | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the keys j with ``i - left <= j <= i + right``, both ends included; causal: ``right = 0``.

    ``window`` is (left, right), or one number for both. With S keys and L queries, i counts from S - L. O(n w d) time,
    O(n w) memory; a window over everything is softmax attention. ``block``, queries to a slice of keys, is speed only.
    """
    left, right = window if isinstance(window, tuple) else (window, window)
    length, keys = q.shape[-2], k.shape[-2]
    if not torch.compiler.is_compiling() and left >= keys - 1 and (is_causal or right >= length - 1):
        return softmax_attention(
            q, k, v, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout, scale=scale
        )
    left, right = smaller(left, keys - 1), 0 if is_causal else smaller(right, length - 1)
    if block is None and attn_mask is None and dropout == 0.0 and covers_most(q, keys, left + right + 1):
        dispatch.record(
            "exact attention with the window as mask", "the window covers most keys, and tiles would leave out few"
        )
        visible = masks.band(length, keys - length, 0, left=left, right=right, device=q.device)
        return softmax_attention(q, k, v, key_mask=key_mask, attn_mask=visible, scale=scale)
    block = block or smaller(min(max(left, right, SMALLEST_BLOCK), LARGEST_BLOCK), length)
    band = masks.band(block, left, right, left=left, right=right, device=q.device)
    return banded_softmax(q, k, v, band, key_mask, attn_mask, behind=left, dropout=dropout, scale=scale)


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
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the keys of the query's block, of ``before`` blocks before it and of ``after`` blocks after it.

    Blocks are counted from the first key, and query i stands at i + S - L. Causal: later keys are masked and ``after``
    is 0. No block has itself or a wrapped one for its missing neighbour (trax wraps the first round to the last).
    """
    length, keys, traced = q.shape[-2], k.shape[-2], torch.compiler.is_compiling()
    last = (keys - 1) // block_size
    if not traced and before >= last and (is_causal or after >= last - (keys - length) // block_size):
        return softmax_attention(
            q, k, v, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout, scale=scale
        )
    before, after = smaller(before, keys // block_size), 0 if is_causal else smaller(after, length // block_size + 1)
    several = 1 if traced else max(SMALLEST_BLOCK // block_size, 1)  # small blocks share one slice of keys
    rows, front = several * block_size, (keys - length) % block_size
    behind, ahead = before * block_size, after * block_size
    if not traced and front + length <= block_size:  # one block, and no key after its last query
        rows, behind, ahead, front = length, min(behind + front, max(keys - length, 0)), 0, 0
    band = masks.band(rows, behind, ahead, left=None, right=0 if is_causal else None, device=q.device)
    if several > 1 and rows > block_size:
        near = masks.band(several, before, after, left=before, right=after, device=q.device)
        band = band & near.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)
    return banded_softmax(q, k, v, band, key_mask, attn_mask, behind=behind, front=front, dropout=dropout, scale=scale)


_TRAITS = Traits(
    paper="Beltagy et al. 2020, arXiv 2004.05150 (window); Kitaev et al. 2020, arXiv 2001.04451 (blocks)",
    formula="softmax over j in [i - left, i + right] of q_i k_j^T / sqrt(d), times v",
    cost="n w d",
    order=1.0,
    causal=True,
    padding=True,
    cross=True,
    mask=True,
    rotary=True,
    memory="window",
    approximates="Softmax",
)


@dataclass(frozen=True, repr=False)
class Local(MaskedAttention[tuple[()], KVCache]):
    """A sliding window: query i sees the keys from i - left to i + right.

    Args:
        window: Positions before and after the query that it sees, (left, right) or one number for both, itself not
            counted. With is_causal=True nothing after it is seen, whatever ``right`` says.
        scale: Factor on the dot products; None means 1/sqrt(width).
    """

    window: int | tuple[int, int] = 128
    scale: float | None = None

    traits = _TRAITS

    def __post_init__(self) -> None:
        """Check the settings."""
        pair = self.window if isinstance(self.window, tuple) else (self.window, self.window)
        if len(pair) != 2 or not all(isinstance(side, int) and side >= 0 for side in pair):
            raise ValueError(f"Local(window={self.window!r}): window must be a number >= 0 or a pair (left, right)")

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()],
        *, is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Softmax inside the window under any mask."""
        return local_attention(
            q, k, v, window=self.window, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask,
            dropout=dropout, scale=self.scale,
        )  # fmt: skip

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: KVCache | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend to the window before the new tokens and to these; keep the last ``left`` tokens."""
        left = self.window[0] if isinstance(self.window, tuple) else self.window
        near = append(state, k, v, key_mask)
        out = local_attention(
            q, near.k, near.v, window=(left, 0), is_causal=True, key_mask=near.visible, scale=self.scale
        )
        return out, last(near, left)


@dataclass(frozen=True, repr=False)
class BlockLocal(MaskedAttention[tuple[()], KVCache]):
    """Neighbouring blocks: a query sees its own block, ``before`` blocks before it and ``after`` blocks after it.

    Args:
        block_size: Tokens per block.
        before: Blocks seen before the own one.
        after: Blocks seen after the own one; none with is_causal=True (the Reformer's local layers have 1 and 0).
        scale: Factor on the dot products; None means 1/sqrt(width).
    """

    block_size: int = 64
    before: int = 1
    after: int = 1
    scale: float | None = None

    traits = _TRAITS

    def __post_init__(self) -> None:
        """Check the settings."""
        at_least(self, "block_size", self.block_size, 1)
        at_least(self, "before", self.before, 0)
        at_least(self, "after", self.after, 0)

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()],
        *, is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Softmax over the neighbouring blocks under any mask."""
        return block_local_attention(
            q, k, v, block_size=self.block_size, before=self.before, after=self.after, is_causal=is_causal,
            key_mask=key_mask, attn_mask=attn_mask, dropout=dropout, scale=self.scale,
        )  # fmt: skip

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: KVCache | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend to the blocks before the new tokens and to these; keep what the next token's block may see."""
        near = append(state, k, v, key_mask)
        out = self.attend(q, near.k, near.v, w, is_causal=True, key_mask=near.visible)
        total = near.k.shape[-2]  # the state begins where a block begins, so blocks are counted from its first key
        return out, last(near, total - max(total // self.block_size - self.before, 0) * self.block_size)
