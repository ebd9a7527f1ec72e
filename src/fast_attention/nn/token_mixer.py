"""``TokenMixer``: any mechanism as a layer from tokens to tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fast_attention import catalogue
from fast_attention.mechanism import Attention, Mechanism, Shape
from fast_attention.nn.bound import Bound
from fast_attention.nn.positions import rotate
from fast_attention.ops.fusion import Fusion


class Turned(NamedTuple):
    """The state of a mixer with rotary positions: the next token's place, and the mechanism's own state."""

    place: Tensor
    inner: Any


class TokenMixer(nn.Module):
    """Any mechanism, attention or mixer, between the projections it needs and no others.

    An attention gets ``in_proj``, one linear map to those of queries, keys and values that it reads
    (``traits.reads``), side by side in this order, and ``out_proj`` behind it. A mixer gets neither: it is just bound.

    Args:
        embed_dim: Width E of the tokens.
        num_heads: Number of heads; must divide ``embed_dim``.
        mechanism: A mechanism, or its name or repr.
        max_len: Longest sequence, for mechanisms with ``traits.bounded``.
        bias: Whether the projections have biases.
        rotary: Turn queries and keys by their places (mechanisms with ``traits.rotary``).
        compile: ``"auto"`` lets elementwise parts be fused, as in ``Bound``.
        device: Where the parameters are made.
        dtype: Type of the parameters.

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``, or ``max_len`` is missing.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mechanism: Mechanism[Any, Any] | str = "Softmax",
        *,
        max_len: int = 0,
        bias: bool = True,
        rotary: bool = False,
        compile: Fusion = "off",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be a positive multiple of num_heads={num_heads}")
        self.mechanism = catalogue.parse(mechanism)
        self.num_heads, self.rotary = num_heads, rotary
        if rotary and not self.mechanism.traits.rotary:
            raise self.mechanism.refuse("rotary positions", "rotary")
        if isinstance(self.mechanism, Attention):
            read = sum(part in self.mechanism.traits.reads for part in "qkv")
            self.in_proj = nn.Linear(embed_dim, read * embed_dim, bias=bias, device=device, dtype=dtype)
            self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        bound = Bound(self.mechanism, Shape(num_heads, embed_dim // num_heads, max_len), compile=compile)
        self.attention = bound.to(device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "*batch length embed"],
        *,
        is_causal: bool = False,
        key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
        attn_mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Float[Tensor, "*batch length embed"]:
        """Mix the tokens of each sequence.

        Args:
            x: Tokens (..., L, E).
            is_causal: Output i depends on tokens up to i.
            key_mask: Boolean (..., L), True = may be seen.
            attn_mask: Boolean (True = may be seen) or additive, broadcastable to (..., H, L, L); mechanisms with
                ``traits.mask``.
            dropout: Probability with which an attention weight is dropped; mechanisms with ``traits.mask``.

        Raises:
            Unsupported: The mechanism's traits deny what was asked.
            ValueError: Sizes do not fit.
        """
        inputs = self._project(x) if isinstance(self.mechanism, Attention) else (x,)
        out = self.attention(*inputs, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout)
        return self._joined(out) if isinstance(self.mechanism, Attention) else out

    def decode(
        self,
        x: Float[Tensor, "*batch stretch embed"],
        state: Any = None,
        *,
        key_mask: Bool[Tensor, "*#batch2 stretch"] | None = None,
    ) -> tuple[Float[Tensor, "*batch stretch embed"], Any]:
        """Mix a stretch of one or more new tokens causally; any split of a sequence gives the same outputs.

        Args:
            x: The stretch (..., N, E).
            state: What the previous stretch returned; None at the start.
            key_mask: Boolean (..., N), True = may be seen, now and later.

        Returns:
            Outputs (..., N, E) and the state to hand to the next stretch.

        Raises:
            Unsupported: The mechanism cannot stream (``traits.memory`` is None).
        """
        if not isinstance(self.mechanism, Attention):
            raise self.mechanism.refuse("decoding", "memory")
        if not self.rotary:
            out, state = self.attention.decode(*self._project(x), state, key_mask=key_mask)
            return self._joined(out), state
        place, inner = (torch.tensor(0), None) if state is None else state
        out, inner = self.attention.decode(*self._project(x, int(place)), inner, key_mask=key_mask)
        return self._joined(out), Turned(place + x.shape[-2], inner)

    def _project(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        read = [part for part in "qkv" if part in self.mechanism.traits.reads]
        parts = self.in_proj(x).unflatten(-1, (len(read), self.num_heads, -1)).movedim(-3, 0).transpose(-3, -2)
        named = dict(zip(read, parts, strict=True))
        # What the mechanism never reads has no projection: anything of the right length stands in for it.
        q, k, v = (named.get(part, named["v"]) for part in "qkv")
        return (rotate(q, start), rotate(k, start), v) if self.rotary else (q, k, v)

    def _joined(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(-3, -2).flatten(-2))
