"""MLP-Mixer (Tolstikhin et al. 2021): mixes tokens by a small network, the same for every channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.engine import masks
from fast_attention.engine.blocks import narrow
from fast_attention.engine.precision import in_float32
from fast_attention.mechanism import Mixer, Shape, Traits
from fast_attention.mechanisms.mixers.fast import affine, lower
from fast_attention.traits import TOKENS
from fast_attention.value import at_least


class TokenMLP(NamedTuple):
    """W1 (hidden, max_len), b1 (hidden,), W2 (max_len, hidden), b2 (max_len,)."""

    W1: Tensor
    b1: Tensor
    W2: Tensor
    b2: Tensor


@in_float32
def token_mlp(
    x: Float[Tensor, "*batch length width"],
    w: TokenMLP,
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch length"] | None = None,
) -> Float[Tensor, "*batch length width"]:
    """``W2 gelu(W1 x + b1) + b2`` along the tokens (arXiv 2105.01601, Eq. 1), weights narrowed to the sequence.

    Masked tokens enter as zeros: only what the biases add is left of them. Causal (not in the
    paper): both matrices lower triangular, hidden unit h being that of token h; needs as many units as tokens.
    """
    length = x.shape[-2]
    x, W1, W2 = masks.drop(x, key_mask), narrow(w.W1, length, axis=1), narrow(w.W2, length, axis=0)
    if is_causal:  # without the units of tokens beyond this sequence
        W1, b1, W2 = (narrow(x, length, axis=axis) for x, axis in ((W1, 0), (w.b1, 0), (W2, 1)))
        hidden = F.gelu(lower(W1, x) + b1[:, None])
        return lower(W2, hidden) + narrow(w.b2, length, axis=0)[:, None]
    hidden = F.gelu(affine(W1, x, w.b1))
    return affine(W2, hidden, narrow(w.b2, length, axis=0))


@dataclass(frozen=True, repr=False)
class MLPMixer(Mixer[TokenMLP, tuple[()]]):
    """The token-mixing branch of an MLP-Mixer block; norm, shortcut and the MLP over channels belong around it.

    Args:
        token_hidden: Hidden units over the tokens (256 to 512 in the paper's models with 49 to 196 tokens). None: as
            many as ``max_len``, of which each may then belong to one token: only so the mixer can be causal.
    """

    token_hidden: int | None = 256

    def __post_init__(self) -> None:
        at_least(self, "token_hidden", 1 if self.token_hidden is None else self.token_hidden, 1)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Linear with a fixed number of units; quadratic, and causal if asked, with one for every token."""
        square = self.token_hidden is None
        return Traits(
            paper="Tolstikhin et al. 2021, arXiv 2105.01601",
            formula="W2 gelu(W1 x + b1) + b2, over tokens",
            cost="n^2 d" if square else "n s d, s hidden units",
            complexity_exponent=2.0 if square else 1.0,
            gpu=TOKENS,
            inputs="x",
            causal=square,
            padding=True,
            positions="absolute",
            needs_max_len=True,
            learned=True,
            matrix=False,
        )

    def weights(self, shape: Shape) -> TokenMLP:
        """Both layers with the variance of their inputs, no bias at the start."""
        n = shape.max_len
        hidden = n if self.token_hidden is None else self.token_hidden
        return TokenMLP(
            W1=nn.Parameter(torch.randn(hidden, n) * max(n, 1) ** -0.5),
            b1=nn.Parameter(torch.zeros(hidden)),
            W2=nn.Parameter(torch.randn(n, hidden) * hidden**-0.5),
            b2=nn.Parameter(torch.zeros(n)),
        )

    def mix(self, x: Tensor, w: TokenMLP, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Mix the tokens by the network, channel by channel."""
        self.within(x.shape[-2], w.b2.shape[0])
        return token_mlp(x, w, is_causal=is_causal, key_mask=key_mask)
