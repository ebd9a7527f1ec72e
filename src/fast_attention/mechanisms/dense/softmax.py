"""Softmax attention (Vaswani et al. 2017): every query weighs every key by the exponential of their dot product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.mechanism import MaskedAttention, Traits
from fast_attention.mechanisms.dense.dense import softmax_attention


@dataclass(frozen=True, repr=False)
class Softmax(MaskedAttention[tuple[()], KVCache]):
    """Exact attention: the reference that every other mechanism is measured against.

    Args:
        scale: Factor on the dot products; None means 1/sqrt(width).
    """

    scale: float | None = None

    traits = Traits(
        paper="Vaswani et al. 2017, arXiv 1706.03762",
        formula="softmax(q k^T / sqrt(d)) v",
        cost="n^2 d",
        order=2.0,
        causal=True,
        padding=True,
        cross=True,
        mask=True,
        rotary=True,
        memory="growing",
    )

    def attend_masked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: tuple[()],
        *,
        is_causal: bool,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Exact attention under any mask."""
        return softmax_attention(
            q, k, v, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout, scale=self.scale
        )

    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: tuple[()],
        state: KVCache | None,
        *,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, KVCache]:
        """Append the stretch to the keys and values seen so far and attend to all of them."""
        state = append(state, k, v, key_mask)
        out = softmax_attention(q, state.k, state.v, is_causal=True, key_mask=state.visible, scale=self.scale)
        return out, state
