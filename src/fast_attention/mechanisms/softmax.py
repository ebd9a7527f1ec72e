"""Softmax attention (Vaswani et al. 2017): every query weighs every key by the exponential of their dot product."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.mechanism import MaskedAttention, Traits
from fast_attention.ops import masks
from fast_attention.ops.history import History, extend


def softmax_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(Q K^T scale + mask) V`` (arXiv 1706.03762, Eq. 1); ``scale`` is 1/sqrt(width) unless given.

    Runs torch's fused kernel, which never holds the score matrix. A query that sees nothing gets zeros.
    """
    length, keys = q.shape[-2], k.shape[-2]
    if is_causal and key_mask is None and attn_mask is None and length == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=scale)
    mask = masks.visible(length, keys, is_causal=is_causal, key_mask=key_mask, device=q.device)
    if attn_mask is not None:
        mask = masks.merge(attn_mask, mask, q.dtype)
    if mask is not None:
        mask = mask.expand(*q.shape[:-1], keys)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)


@dataclass(frozen=True, repr=False)
class Softmax(MaskedAttention[tuple[()], History]):
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
        state: History | None,
        *,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, History]:
        """Append the stretch to the keys and values seen so far and attend to all of them."""
        state = extend(state, k, v, key_mask)
        out = softmax_attention(q, state.k, state.v, is_causal=True, key_mask=state.seen, scale=self.scale)
        return out, state
