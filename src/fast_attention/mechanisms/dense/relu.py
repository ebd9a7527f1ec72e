"""ReLU attention (Wortsman et al. 2023, and others): scores below zero get no weight at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.kv_cache import KVCache, append
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.mechanism import MaskedAttention, Traits
from fast_attention.mechanisms.dense import rectified
from fast_attention.mechanisms.dense.rectified import Norm
from fast_attention.value import at_least, one_of

Power = Literal[1, 2]
NORMS: tuple[Norm, ...] = get_args(Norm)


@in_float32
def relu_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    norm: Norm = "sum",
    power: Power = 1,
    scale: float | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "*batch length values"]:
    """``A V`` with ``A_ij = relu(q_i . k_j scale)^power / n_i``.

    ``norm`` chooses n_i: ``"sum"`` of the row plus ``eps`` (our reading of "ReLU can also be used" in Young and
    Shen's lecture "Attention is All You Need", 2024, which gives no formula), ``"length"`` for the number of keys
    that query i may see (arXiv 2309.08586; i + 1 when causal), ``"none"`` for 1. An additive ``attn_mask`` is added
    to the scores before the relu, a boolean one removes. A row without a positive score gives zeros. With
    ``attn_mask`` or ``dropout`` it holds the scores (..., L, S), else tiles of them.
    """
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is None and dropout == 0.0:
        number = NORMS.index(norm)
        return _attend(q, k, v, key_mask, is_causal=is_causal, norm=number, power=power, scale=factor, eps=float(eps))
    how = rectified.How(is_causal, norm, power, factor, eps)
    dispatch.record("all scores at once", "a mask of any form, or dropout")
    return rectified.masked(q, k, v, key_mask, how=how, attn_mask=attn_mask, dropout=dropout)


@opaque(like_queries)
def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *,
    is_causal: bool, norm: int, power: Power, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    return rectified.attend(q, k, v, key_mask, rectified.How(is_causal, NORMS[norm], power, scale, eps))


@dataclass(frozen=True, repr=False)
class ReLUAttention(MaskedAttention[tuple[()], KVCache]):
    """Attention with relu in the place of softmax: sparse weights, no exponential.

    Quadratic, unlike the Performer's ReLU kernel, where relu acts on features. Its error against softmax is not
    declared: the two agree in no limit, so the number would mean nothing.

    Args:
        norm: What a row is divided by: its ``"sum"`` (the output then does not change with the length of q, up to
            ``eps``), the number of keys it sees (``"length"``) or nothing (``"none"``).
        power: 1, or 2 for squared relu (Primer, arXiv 2109.08668).
        scale: Factor on the dot products; None means 1/sqrt(width).
        eps: Added to the sum, in units of the summed scores.
    """

    norm: Norm = "sum"
    power: Power = 1
    scale: float | None = None
    eps: float = 1e-6

    unordered = True
    traits = Traits(
        paper="Wortsman et al. 2023, arXiv 2309.08586",
        formula="relu(q k^T / sqrt(d)) v / sum",
        cost="n^2 d",
        order=2.0,
        causal=True,
        padding=True,
        cross=True,
        mask=True,
        rotary=True,
        memory="growing",
    )

    def __post_init__(self) -> None:
        one_of(self, "norm", self.norm, Norm)
        one_of(self, "power", self.power, Power)
        at_least(self, "eps", self.eps, 0.0)

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *,
        is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Weigh every key for every query under any mask."""
        return relu_attention(
            q, k, v, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout,
            norm=self.norm, power=self.power, scale=self.scale, eps=self.eps,
        )  # fmt: skip

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], state: KVCache | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Append the new tokens to the cached keys and values and weigh all of them."""
        state = append(state, k, v, key_mask)
        return self.attend(q, state.k, state.v, w, is_causal=True, key_mask=state.visible), state
