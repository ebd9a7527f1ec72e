"""``CausalConvolution``: mixes each token with the few before it, ahead of attention (arXiv 2312.00752, 2402.18668)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fast_attention import checks
from fast_attention.engine import masks
from fast_attention.engine.precision import in_float32
from fast_attention.parallel.shards import Shards
from fast_attention.parallel.spreading import Spread
from fast_attention.parallel.windows import fetch


class ConvolutionState(NamedTuple):
    """The decoding state of a layer behind a convolution: the last inputs (B, size - 1, E), and the layer's state."""

    recent: Tensor
    inner: Any


class CausalConvolution(Spread, nn.Module):
    """A short depthwise convolution in front of queries, keys and values: ``x_t + sum_i weight_i x_(t - i)``, i < size.

    Linear attention and other constant states cannot single out the token before; Based (arXiv 2402.18668) and Mamba
    (arXiv 2312.00752) give it to them so, with ``size`` 4. The weights start at zero: the tokens as they are.

    Args:
        width: Width E of the tokens; each channel has its own weights.
        size: Tokens that one output sees: its own and ``size - 1`` earlier ones.

    Raises:
        ValueError: ``size`` is below 1.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"CausalConvolution(size={size}): size must be at least 1, the token itself")
        self.weight = nn.Parameter(torch.zeros(size, width))

    def forward(
        self, x: Float[Tensor, "*batch length embed"], *, key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
        group: Any = None,
    ) -> Float[Tensor, "*batch length embed"]:  # fmt: skip
        """Tokens (..., L, E) to tokens (..., L, E); where ``key_mask`` (..., L) is False a token counts as zeros.

        ``group``: the processes whose tokens together are the sequence.
        """
        return self.decode(x, key_mask=key_mask, group=group)[0]

    def _spread(self, x: Tensor, recent: Tensor | None, shards: Shards) -> tuple[Tensor, Tensor]:
        """Tokens of this process, and what follows them all needs, after ``recent`` before the first process's."""
        before = len(self.weight) - 1
        earlier = x.new_zeros(*x.shape[:-2], before, x.shape[-1]) if recent is None else recent
        starts = [0, *(end for _, end in shards.borders())]

        def up_to(end: int, ends: list[int]) -> Tensor:
            tokens = fetch(x, [(max(each - before, 0), each) for each in ends], shards)
            return torch.cat([earlier[..., min(end, before) :, :], tokens], -2)

        past = up_to(shards.start, starts[:-1])
        after = up_to(starts[-1], [starts[-1]] * shards.world)
        return convolve(torch.cat([past, x], -2), self.weight), after

    def decode(
        self,
        x: Float[Tensor, "*batch new embed"],
        recent: Tensor | None = None,
        *,
        key_mask: Bool[Tensor, "*#batch2 new"] | None = None,
        group: Any = None,
    ) -> tuple[Float[Tensor, "*batch new embed"], Tensor]:
        """New tokens (..., N, E), and what the next call needs of the past; any split of a sequence gives the same.

        Args:
            x: The new tokens.
            recent: What the previous call returned; None at the start.
            key_mask: Boolean (..., N), False = counts as zeros, now and later.
            group: The processes whose tokens together are new, as in ``TokenMixer.decode``.

        Raises:
            ValueError: ``recent`` or ``key_mask`` is not of these tokens.
        """
        x = _visible(x, key_mask)
        shape = (*x.shape[:-2], len(self.weight) - 1, x.shape[-1])
        recent = x.new_zeros(shape) if recent is None else recent
        if tuple(recent.shape) != shape:
            raise ValueError(f"the state holds earlier tokens of shape {tuple(recent.shape)}; this call needs {shape}")
        if (shards := self.shards_of(group, x)) is not None:
            return self._spread(x, recent, shards)
        joined = torch.cat([recent, x], -2)
        # A copy: a slice would keep a whole prompt in memory.
        return convolve(joined, self.weight), joined[..., x.shape[-2] :, :].clone()

    def extra_repr(self) -> str:
        """What one output sees."""
        return f"size={len(self.weight)}"


def _visible(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """The tokens, zeros where they are masked."""
    if key_mask is not None:
        checks.key_mask(key_mask, tuple(x.shape[:-2]), x)
        x = masks.drop(x, key_mask)
    return x


@in_float32
def convolve(
    x: Float[Tensor, "*batch joined embed"], weight: Float[Tensor, "size embed"]
) -> Float[Tensor, "*batch length embed"]:
    """``x_t + sum_i weight_i x_(t - i)`` for all tokens but the first ``size - 1``, which are only seen."""
    before = len(weight) - 1
    length = x.shape[-2] - before
    out = x[..., before:, :]
    for i, factor in enumerate(weight):
        out = out + factor * x[..., before - i : before - i + length, :]
    return out
