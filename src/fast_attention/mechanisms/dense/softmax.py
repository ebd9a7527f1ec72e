"""Softmax attention (Vaswani et al. 2017): every query weighs every key by the exponential of their dot product.

With sinks (OpenAI 2025, arXiv 2508.10925) a learned score of each head takes weight, with no value:
``out_i = sum_j e^{s_ij} v_j / (sum_j e^{s_ij} + e^{sink_h})``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.biases.bias import Bias, BiasMixin
from fast_attention.engine import heads, masks, operation, tiles, trace
from fast_attention.engine.fused import fused_attention
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.offsets import Positions
from fast_attention.engine.precision import in_float32
from fast_attention.gpu import patterns
from fast_attention.mechanism import MaskedAttention, Traits
from fast_attention.mechanisms.dense import rows
from fast_attention.mechanisms.dense.relative import relative_attention
from fast_attention.mechanisms.dense.scores import Scores
from fast_attention.traits import FUSED


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
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(Q K^T scale + mask) V`` (arXiv 1706.03762, Eq. 1); ``scale`` is 1/sqrt(width) unless given.

    Runs torch's fused kernel, which never holds the score matrix; on a CPU the compiled core where it is faster, in
    causal order and on some processors without, and where the kernel would want a mask of all pairs. A query that sees
    nothing gets zeros. ``bias`` gives what scores gain by offsets j - i, as ``engine.offsets`` has them, head by head,
    and ``sinks`` a score of each head whose exponential is added to normalisers: q, k and v are then (..., H, L, E).
    """
    if is_causal or key_mask is not None:
        is_causal, key_mask = _needed(q, is_causal, key_mask)
    masked: Any = {"is_causal": is_causal, "key_mask": key_mask, "attn_mask": attn_mask, "dropout": dropout}
    if bias is not None or sinks is not None:
        return relative_attention(q, k, v, bias, sinks, scale=scale, **masked)
    if q.is_cpu and q.dtype == torch.float16:  # torch's kernel is slower there than both casts
        return in_float32(softmax_attention)(q, k, v, scale=scale, **masked)
    length, keys = q.shape[-2], k.shape[-2]
    if key_mask is None and attn_mask is None and (length == keys or not is_causal):
        if not dropout and tiles.pays(q, k, v, is_causal=is_causal):
            return relative_attention(q, k, v, None, is_causal=is_causal, scale=scale)
        trace.record("torch's fused kernel", f"{'causal without a' if is_causal else 'no'} mask")
        return fused_attention(q, k, v, is_causal=is_causal, dropout=dropout, scale=scale)
    why = "an attn_mask, dropout or low precision"
    if attn_mask is None and dropout == 0.0 and q.dtype.itemsize >= 4 and (is_causal or key_mask is not None):
        why = operation.unsupported_reason(v) or rows.few(v, length, at_least=2**18)
        if not why and not tiles.against(q, k, v):
            return relative_attention(q, k, v, None, is_causal=is_causal, key_mask=key_mask, scale=scale)
        if not why:
            scores = Scores(Q=q * (q.shape[-1] ** -0.5 if scale is None else scale), K=k)
            return rows.attend(v, scores, is_causal=is_causal, key_mask=key_mask)
    mask = masks.visible(length, keys, is_causal=is_causal, key_mask=key_mask, device=q.device)
    if attn_mask is not None:
        mask = masks.merge(attn_mask, mask, q.dtype)
    if mask is not None and not mask.ndim == q.ndim >= 4:  # one for all heads: the kernel would copy it for each
        mask = mask.expand(*q.shape[:-1], keys)
    trace.record("torch's fused kernel", f"with a mask: {why}")
    return fused_attention(q, k, v, mask, dropout=dropout, scale=scale)


def _needed(q: Tensor, is_causal: bool, key_mask: Tensor | None) -> tuple[bool, Tensor | None]:
    """``is_causal`` and ``key_mask`` where they hide anything: one query sees all keys, and a mask may be all True."""
    if operation.unsupported_reason(q):
        return is_causal, key_mask
    return is_causal and q.shape[-2] != 1, None if key_mask is None or bool(key_mask.all()) else key_mask


@dataclass(frozen=True, repr=False)
class Softmax(BiasMixin, MaskedAttention[Any, KVCache]):  # type: ignore[reportIncompatibleVariableOverride]
    """Exact attention: the reference that every other mechanism is measured against.

    Args:
        scale: Factor on the dot products; None means 1/sqrt(width).
        bias: What scores gain by the distance of query and key: ``ALiBi()``, ``T5Buckets()`` or ``TransformerXL()``.
        sinks: Whether every head has a learned score more, of no value, that takes weight from all keys (gpt-oss).
    """

    scale: float | None = None
    bias: Bias | None = None
    sinks: bool = False

    base_traits = Traits(
        paper="Vaswani et al. 2017, arXiv 1706.03762",
        formula="softmax(q k^T / sqrt(d)) v",
        cost="n^2 d",
        complexity_exponent=2.0,
        gpu=FUSED,
        causal=True,
        padding=True,
        cross=True,
        mask=True,
        rotary=True,
        memory="growing",
    )

    @property
    def unordered(self) -> bool:  # type: ignore[override]
        """Whether neither positions nor heads count."""
        return self.is_plain

    @property
    def shares_cache(self) -> bool:  # type: ignore[override]
        """Whether the scores are of products alone."""
        return self.is_plain

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, *,
        is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Attend exactly under any mask."""
        q, bias = self.positions(q, w, self.scale)
        return softmax_attention(
            q, k, v, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout, scale=self.scale,
            bias=bias, sinks=self.sinks_of(w),
        )  # fmt: skip

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """By FlexAttention, on a GPU, where lengths differ; equal ones are a batch for torch's fused attention."""
        if not self.is_plain or len({*lengths}) == 1:
            return None
        right = 0 if is_causal else None
        return patterns.attend_packed(q, k, v, lengths, None, right, key_mask, scale=self.scale)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: KVCache | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Append the new tokens to the cached keys and values and attend to all of them."""
        state = append(state, k, v, key_mask)
        alone = q.shape[-3] != k.shape[-3] and q.shape[-2] == 1  # a last query sees all keys; lengths may be symbols
        share = heads.folded if alone else heads.viewed
        attend = partial(self.attend, w=w, is_causal=not alone)
        return share(attend, q, state.k, state.v, key_mask=state.visible), state
