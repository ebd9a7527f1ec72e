"""``TokenMixer``: any mechanism as a layer from tokens to tokens, with projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fast_attention import catalogue, checks
from fast_attention.engine import heads, masks
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.nn.positions import Rotary, check_positions, positions_of, rotary_for, rotate_by
from fast_attention.parallel.spreading import Spread


class RotaryState(NamedTuple):
    """The decoding state of a mixer with rotary positions: the next token's position, and the mechanism's state."""

    position: Tensor
    inner: Any


class TokenMixer(Spread, nn.Module):
    """A layer of any mechanism, attention or mixer, with the projections that it needs and no others.

    An attention gets ``in_proj``, one linear map to those of queries, keys and values that it reads
    (``traits.inputs``), side by side in this order, and ``out_proj`` after it. A mixer gets neither.

    Args:
        embed_dim: Width E of the tokens.
        num_heads: Number of heads; must divide ``embed_dim``.
        mechanism: A mechanism, or its name or repr.
        max_len: Longest sequence, for mechanisms with ``traits.needs_max_len``.
        bias: Whether the projections have biases.
        num_kv_heads: Heads of keys and values, a divisor of ``num_heads`` (grouped queries); None means ``num_heads``.
            Each serves as many queries' heads in a row; the mechanism, and its state, see it repeated.
        rotary: Rotate queries and keys by their positions (mechanisms with ``traits.rotary``): True for ``Rotary()``,
            or one with another base or scaling.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, heads.width(embed_dim, num_heads)
        self.mechanism = catalogue.parse(mechanism)
        self.num_kv_heads = heads.grouped(num_heads, num_kv_heads)
        self.rotary = rotary_for(self.mechanism, rotary, self.head_dim)
        if isinstance(self.mechanism, Attention):
            self.in_proj = nn.Linear(embed_dim, sum(self._widths()), bias=bias, device=device, dtype=dtype)
            self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        elif num_kv_heads not in (None, num_heads):
            raise Unsupported(f"{self.mechanism!r} mixes whole tokens and has no keys: num_kv_heads is for attentions")
        bound = Bound(self.mechanism, Shape(num_heads, self.head_dim, max_len))
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
        group: Any = None,
    ) -> Float[Tensor, "*batch length embed"]:
        """Mix the tokens of each sequence.

        Args:
            x: Tokens (..., L, E).
            is_causal: Output i depends on tokens up to i.
            key_mask: Boolean (..., L), True = may be seen.
            attn_mask: Boolean (True = may be seen) or additive, broadcastable to (..., H, L, L); mechanisms with
                ``traits.mask``.
            dropout: Probability with which an attention weight is dropped; mechanisms with ``traits.mask``.
            positions: Positions of the tokens, (L) or (..., L), with ``rotary``; None for 0, 1, 2, ...
            group: The processes whose tokens together are the sequence, as in ``fast_attention.attention``.

        Raises:
            Unsupported: The mechanism's traits deny what was asked.
            ValueError: Sizes do not fit.
        """
        checks.tokens(x, self.num_heads * self.head_dim)
        at = None if positions is None else self._positions(x, positions)
        group = self.group_of(group)
        if group is not None and at is None and self.rotary is not None:
            at, _ = positions_of(self.rotary, None, self.shards_of(group, x), x.device)
        options: Any = {"is_causal": is_causal, "key_mask": key_mask, "attn_mask": attn_mask}
        options |= {"dropout": dropout, "group": group}
        if not isinstance(self.mechanism, Attention):
            return self.attention(x, **options)
        return self._output(self.attention(*self._project(x, at, key_mask), **options, enable_gqa=True))

    def decode(
        self,
        x: Float[Tensor, "*batch new embed"],
        state: Any = None,
        *,
        key_mask: Bool[Tensor, "*#batch2 new"] | None = None,
        positions: Int[Tensor, "*#batch3 new"] | None = None,
        group: Any = None,
    ) -> tuple[Float[Tensor, "*batch new embed"], Any]:
        """Mix one or more new tokens causally; any split of a sequence gives the same outputs.

        Args:
            x: The new tokens (..., N, E).
            state: What the previous call returned; None at the start.
            key_mask: Boolean (..., N), True = may be seen, now and later.
            positions: Positions of the tokens, (N) or (..., N), with ``rotary``; None to count on from the last one.
            group: The processes whose tokens together are new, each some of them; the state is that after all.

        Returns:
            Outputs (..., N, E) and the state for the next call.

        Raises:
            Unsupported: The mechanism cannot stream (``traits.memory`` is None), or the positions cannot.
            ValueError: Sizes do not fit, or the state is of another layer or batch.
        """
        if not isinstance(self.mechanism, Attention):
            raise self.mechanism.refuse("decoding", "memory")
        checks.tokens(x, self.num_heads * self.head_dim)
        group = self.group_of(group)
        if self.rotary is None:
            at = None if positions is None else self._positions(x, positions)
            out, state = self.attention.decode(
                *self._project(x, at, key_mask), state, key_mask=key_mask, group=group, enable_gqa=True
            )  # fmt: skip
            return self._output(out), state
        if state is not None and not isinstance(state, RotaryState):
            raise ValueError(f"state is a {type(state).__name__}: hand over what this layer's decode returned")
        position, inner = (torch.tensor(0), None) if state is None else state
        shards = self.shards_of(group, x)
        start = position if shards is None else position + shards.start
        at = self._positions(x, positions, start)
        self.rotary.check_decoding(at)
        inputs = self._project(x, at, key_mask)
        out, inner = self.attention.decode(*inputs, inner, key_mask=key_mask, group=group, enable_gqa=True)
        if shards is not None:
            after = at[..., -1] + 1 - shards.start - x.shape[-2] + shards.length
        else:
            after = at[..., -1] + 1 if x.shape[-2] else position
        return self._output(out), RotaryState(after, inner)

    def _projections(self) -> list[str]:
        """The projections that the mechanism reads, in their order in ``in_proj``."""
        return [name for name in "qkv" if name in self.mechanism.traits.inputs]

    def _positions(self, x: Tensor, positions: Tensor | None, start: Tensor | None = None) -> Tensor:
        """The tokens' positions (L) or (..., L)."""
        if positions is None:
            offsets = torch.arange(x.shape[-2], device=x.device)
            return offsets if start is None else start.to(x.device)[..., None] + offsets
        if self.rotary is None:
            raise ValueError("positions are given and this module has no use for them: build it with rotary=True")
        return check_positions(positions, "positions", tuple(x.shape[:-2]), x.shape[-2])

    def _widths(self) -> list[int]:
        head_counts = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        return [head_counts[name] * self.head_dim for name in self._projections()]

    def _project(
        self, x: Tensor, at: Tensor | None = None, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if key_mask is not None:
            checks.key_mask(key_mask, tuple(x.shape[:-2]), x)
        x = masks.drop_huge(x, key_mask)
        projected = zip(self._projections(), self.in_proj(x).split(self._widths(), -1), strict=True)
        named = {name: y.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for name, y in projected}
        if self.rotary is not None:
            sin_cos = self.rotary.sin_cos(self._positions(x, None) if at is None else at, self.head_dim)
            named |= {name: rotate_by(named[name], sin_cos) for name in "qk" if name in named}
        # What the mechanism never reads has no projection: any tensor of the right length takes its argument.
        k, v = named.get("k", named["v"]), named["v"]
        return named["q"] if "q" in named else heads.repeated(self.num_heads, v=v)[0], k, v

    def _output(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(-3, -2).flatten(-2))
