"""``TokenMixer``: any mechanism as a layer from tokens to tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fast_attention import catalogue, checks
from fast_attention.engine import heads, masks
from fast_attention.engine.fusion import Fusion
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.nn.positions import Rotary, checked, rotary_for, turned


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
        num_kv_heads: Heads of keys and values, a divisor of ``num_heads`` (grouped queries); None means ``num_heads``.
            Each serves as many queries' heads in a row; the mechanism, and its state, see it repeated.
        rotary: Turn queries and keys by their places (mechanisms with ``traits.rotary``): True for ``Rotary()``, or one
            with another base or scaling.
        compile: ``"auto"`` lets elementwise parts be fused, as in ``Bound``.
        device: Where the parameters are made.
        dtype: Type of the parameters.

    Raises:
        Unsupported: ``rotary`` or ``num_kv_heads`` with a mechanism that has no use for it.
        ValueError: ``num_heads`` does not divide ``embed_dim``, ``num_kv_heads`` not ``num_heads``, or ``max_len`` is
            missing.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mechanism: Mechanism[Any, Any] | str = "Softmax",
        *,
        max_len: int = 0,
        bias: bool = True,
        num_kv_heads: int | None = None,
        rotary: bool | Rotary = False,
        compile: Fusion = "off",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be a positive multiple of num_heads={num_heads}")
        self.mechanism = catalogue.parse(mechanism)
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.num_kv_heads = heads.grouped(num_heads, num_kv_heads)
        self.rotary = rotary_for(self.mechanism, rotary, self.head_dim)
        if isinstance(self.mechanism, Attention):
            self.in_proj = nn.Linear(embed_dim, sum(self._widths()), bias=bias, device=device, dtype=dtype)
            self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        elif num_kv_heads not in (None, num_heads):
            raise Unsupported(f"{self.mechanism!r} mixes whole tokens and has no keys: num_kv_heads is for attentions")
        bound = Bound(self.mechanism, Shape(num_heads, self.head_dim, max_len), compile=compile)
        self.attention = bound.to(device=device, dtype=dtype)

    def forward(
        self,
        x: Float[Tensor, "*batch length embed"],
        *,
        is_causal: bool = False,
        key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
        attn_mask: Tensor | None = None,
        dropout: float = 0.0,
        positions: Int[Tensor, "*#batch3 length"] | None = None,
    ) -> Float[Tensor, "*batch length embed"]:
        """Mix the tokens of each sequence.

        Args:
            x: Tokens (..., L, E).
            is_causal: Output i depends on tokens up to i.
            key_mask: Boolean (..., L), True = may be seen.
            attn_mask: Boolean (True = may be seen) or additive, broadcastable to (..., H, L, L); mechanisms with
                ``traits.mask``.
            dropout: Probability with which an attention weight is dropped; mechanisms with ``traits.mask``.
            positions: Places of the tokens, (L) or (..., L), with ``rotary``; None for 0, 1, 2, ...

        Raises:
            Unsupported: The mechanism's traits deny what was asked.
            ValueError: Sizes do not fit.
        """
        places = None if positions is None else self._places(x, positions)
        inputs = self._project(x, places, key_mask) if isinstance(self.mechanism, Attention) else (x,)
        out = self.attention(*inputs, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask, dropout=dropout)
        return self._joined(out) if isinstance(self.mechanism, Attention) else out

    def decode(
        self,
        x: Float[Tensor, "*batch stretch embed"],
        state: Any = None,
        *,
        key_mask: Bool[Tensor, "*#batch2 stretch"] | None = None,
        positions: Int[Tensor, "*#batch3 stretch"] | None = None,
    ) -> tuple[Float[Tensor, "*batch stretch embed"], Any]:
        """Mix a stretch of one or more new tokens causally; any split of a sequence gives the same outputs.

        Args:
            x: The stretch (..., N, E).
            state: What the previous stretch returned; None at the start.
            key_mask: Boolean (..., N), True = may be seen, now and later.
            positions: Places of the tokens, (N) or (..., N), with ``rotary``; None to go on from the last one.

        Returns:
            Outputs (..., N, E) and the state to hand to the next stretch.

        Raises:
            Unsupported: The mechanism cannot stream (``traits.memory`` is None), or the positions cannot.
        """
        if not isinstance(self.mechanism, Attention):
            raise self.mechanism.refuse("decoding", "memory")
        if self.rotary is None:
            places = None if positions is None else self._places(x, positions)
            out, state = self.attention.decode(*self._project(x, places, key_mask), state, key_mask=key_mask)
            return self._joined(out), state
        place, inner = (torch.tensor(0), None) if state is None else state
        places = self._places(x, positions, place)
        self.rotary.decodes(places)
        out, inner = self.attention.decode(*self._project(x, places, key_mask), inner, key_mask=key_mask)
        return self._joined(out), Turned(places[..., -1] + 1 if x.shape[-2] else place, inner)

    def with_mechanism(self, mechanism: Mechanism[Any, Any]) -> TokenMixer:
        """The same layer with another attention: its projections are copies of this one's, its own weights are drawn.

        Raises:
            Unsupported: One of the two mixes whole tokens, the new one reads a projection that this layer has not, or
                it cannot serve rotary positions or grouped heads.
        """
        for each in (self.mechanism, mechanism):
            if not isinstance(each, Attention):
                raise Unsupported(
                    f"{each!r} mixes whole tokens and has no heads: its layer has no projections to go on with"
                )
        if missing := [part for part in mechanism.traits.reads if part not in self.mechanism.traits.reads]:
            raise Unsupported(
                f"{mechanism!r} reads {', '.join(missing)}, and a layer of {self.mechanism!r} has no such projection. "
                f"What would work: a mechanism that reads {', '.join(self.mechanism.traits.reads)}, or fewer of them"
            )
        like, bias = self.in_proj.weight, self.in_proj.bias is not None
        made = TokenMixer(
            self.num_heads * self.head_dim, self.num_heads, mechanism, max_len=self.attention.shape.max_len, bias=bias,
            num_kv_heads=self.num_kv_heads, rotary=self.rotary or False, compile=self.attention.fusion,
            device=like.device, dtype=like.dtype,
        )  # fmt: skip
        wanted = torch.cat([
            torch.full((width,), part in mechanism.traits.reads)
            for part, width in zip(self._read(), self._widths(), strict=True)
        ])  # fmt: skip
        with torch.no_grad():
            for name, parameter in made.in_proj.named_parameters():
                parameter.copy_(self.in_proj.get_parameter(name)[wanted.to(like.device)])
        made.out_proj.load_state_dict(self.out_proj.state_dict())
        return made.train(self.training)

    def _read(self) -> list[str]:
        """The projections that the mechanism reads, in their order in ``in_proj``."""
        return [part for part in "qkv" if part in self.mechanism.traits.reads]

    def _places(self, x: Tensor, positions: Tensor | None, start: Tensor | None = None) -> Tensor:
        """The tokens' places (L) or (..., L)."""
        if positions is None:
            counted = torch.arange(x.shape[-2], device=x.device)
            return counted if start is None else start.to(x.device)[..., None] + counted
        if self.rotary is None:
            raise ValueError("positions are given and this module turns nothing by them: build it with rotary=True")
        return checked(positions, "positions", tuple(x.shape[:-2]), x.shape[-2])

    def _widths(self) -> list[int]:
        own = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        return [own[part] * self.head_dim for part in self._read()]

    def _project(
        self, x: Tensor, places: Tensor | None = None, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if key_mask is not None:
            checks.key_mask(key_mask, tuple(x.shape[:-2]), x)
        x = masks.tame(x, key_mask)
        parts = zip(self._read(), self.in_proj(x).split(self._widths(), -1), strict=True)
        named = {part: y.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for part, y in parts}
        if self.rotary is not None:
            waves = self.rotary.waves(self._places(x, None) if places is None else places, self.head_dim)
            named |= {part: turned(named[part], waves) for part in "qk" if part in named}
        # What the mechanism never reads has no projection: anything of the right length stands in for it.
        k, v = heads.repeated(self.num_heads, k=named.get("k", named["v"]), v=named["v"])
        return named.get("q", v), k, v

    def _joined(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(-3, -2).flatten(-2))
