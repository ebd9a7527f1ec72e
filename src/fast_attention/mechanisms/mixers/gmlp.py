"""gMLP (Liu et al. 2021): a feed-forward layer, one half of which is mixed over the tokens and gates the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.engine import masks, trace
from fast_attention.engine.blocks import narrow
from fast_attention.engine.numerics import clamp
from fast_attention.engine.precision import in_float32
from fast_attention.mechanism import Mixer, Shape, Traits
from fast_attention.mechanisms.mixers.fast import affine, lower
from fast_attention.traits import TOKENS
from fast_attention.value import at_least


class TinyAttention(NamedTuple):
    """One small head: queries, keys and values side by side, QKV (width, 3 a), and its output, O (a, half)."""

    QKV: Tensor
    O: Tensor


class GatedMLP(NamedTuple):
    """U (width, 2 half) and V (half, width) with biases; gain and shift of the norm; W (n, n) or (2 n - 1,); b (n,)."""

    U: Tensor
    U_bias: Tensor
    gain: Tensor
    shift: Tensor
    W: Tensor
    b: Tensor
    V: Tensor
    V_bias: Tensor
    tiny: TinyAttention | None


@in_float32
def gated_mlp(
    x: Float[Tensor, "*batch length width"],
    w: GatedMLP,
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch length"] | None = None,
) -> Float[Tensor, "*batch length width"]:
    """``s(gelu(x U)) V`` with the spatial gating unit ``s([Z1, Z2]) = Z1 * (W LN(Z2) + b)`` (arXiv 2105.08050).

    W and b are narrowed to the sequence; a one-dimensional W has the diagonals of a Toeplitz matrix. ``w.tiny`` adds a
    small attention from x to the gate (aMLP). Causal: the lower triangle of W. Masked tokens enter as zeros and are
    zeros again where W mixes, so that they change nothing.
    """
    x, length = masks.drop(x, key_mask), x.shape[-2]
    saved, gate = F.gelu(F.linear(x, w.U.mT, w.U_bias)).chunk(2, -1)
    gate = masks.drop(F.layer_norm(gate, gate.shape[-1:], w.gain, w.shift), key_mask)
    W, b = spatial_weights(w.W, length), narrow(w.b, length, axis=0)
    gate = lower(W, gate) + b[:, None] if is_causal else affine(W, gate, b)
    if w.tiny is not None:
        q, k, v = (x @ w.tiny.QKV).chunk(3, -1)
        mask = masks.visible(length, length, is_causal=is_causal, key_mask=key_mask, device=x.device)
        trace.record("a small head with all its scores at once", "added to the gate, under a mask", width=q.shape[-1])
        scores = clamp(q) @ clamp(k).mT * q.shape[-1] ** -0.5
        gate = gate + masks.masked_softmax(scores, mask) @ v @ w.tiny.O
    return F.linear(saved * gate, w.V.mT, w.V_bias)


def spatial_weights(W: Tensor, length: int) -> Float[Tensor, "length length"]:
    """The corner of W for ``length`` tokens; of a Toeplitz matrix W_ij = W[j - i + n - 1]."""
    if W.ndim == 2:
        return narrow(narrow(W, length, axis=0), length, axis=1)
    position = torch.arange(length, device=W.device)
    return W[position - position[:, None] + (W.shape[0] - 1) // 2]


@dataclass(frozen=True, repr=False)
class GMLP(Mixer[GatedMLP, tuple[()]]):
    """The residual branch of a gMLP block, between the norm before it and the shortcut around it, which are not part.

    It replaces attention and feed-forward layer together. At the start its gate is all but one, so that it begins as
    a feed-forward layer.

    Args:
        expansion: Width of the hidden layer as a multiple of the token width; half of it gates the other half.
        attention_dim: Width of a single small attention head that adds to the gate (aMLP; 64 in the paper); 0: none.
        toeplitz: Weights over tokens depend on the distance alone: 2 max_len - 1 of them, not max_len^2.
    """

    expansion: int = 6
    attention_dim: int = 0
    toeplitz: bool = False

    traits = Traits(
        paper="Liu et al. 2021, arXiv 2105.08050",
        formula="(Z1 * (W LN(Z2) + b)) V, [Z1, Z2] = gelu(x U)",
        cost="n^2 e/2 + n d e, e the hidden width",
        complexity_exponent=2.0,
        gpu=TOKENS,
        inputs="x",
        causal=True,
        padding=True,
        positions="absolute",
        needs_max_len=True,
        learned=True,
        matrix=False,
    )

    def __post_init__(self) -> None:
        at_least(self, "expansion", self.expansion, 1)
        at_least(self, "attention_dim", self.attention_dim, 0)

    def weights(self, shape: Shape) -> GatedMLP:
        """U and V keep the variance of their inputs; W is within 1e-3/max_len of zero and b one: the gate is open."""
        width, n, a = shape.width, shape.max_len, self.attention_dim
        half = max(width * self.expansion // 2, 1)
        W = torch.empty((2 * n - 1,) if self.toeplitz else (n, n)).uniform_(-1e-3, 1e-3) / n
        return GatedMLP(
            U=_normal(width, 2 * half),
            U_bias=nn.Parameter(torch.zeros(2 * half)),
            gain=nn.Parameter(torch.ones(half)),
            shift=nn.Parameter(torch.zeros(half)),
            W=nn.Parameter(W),
            b=nn.Parameter(torch.ones(n)),
            V=_normal(half, width),
            V_bias=nn.Parameter(torch.zeros(width)),
            tiny=TinyAttention(_normal(width, 3 * a), _normal(a, half)) if a else None,
        )

    def mix(self, x: Tensor, w: GatedMLP, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Mix tokens and channels by the gated MLP."""
        self.within(x.shape[-2], w.b.shape[0])
        return gated_mlp(x, w, is_causal=is_causal, key_mask=key_mask)


def _normal(inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(inputs, outputs) * inputs**-0.5)
