"""FNet (Lee-Thorp et al. 2021): tokens and channels mixed by a Fourier transform, with nothing to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.mechanism import Mixer, Traits
from fast_attention.ops.precision import in_float32
from fast_attention.ops.value import one_of

Norm = Literal["backward", "ortho"]


@in_float32
def fourier_mix(
    x: Float[Tensor, "*batch length width"], *, norm: Norm = "backward"
) -> Float[Tensor, "*batch length width"]:
    """``Re F_seq(F_hidden(x))`` (arXiv 2105.03824), in O(n d (log n + log d)).

    ``norm="backward"`` does not scale, as published; ``"ortho"`` divides by sqrt(n d), so that norms never grow.
    Of the hidden axis only the first half is transformed along the sequence: x being real, ``Re Y[m, n] =
    Re Y[-m, -n]`` gives the rest.
    """
    half = torch.fft.fft(torch.fft.rfft(x, dim=-1, norm=norm), dim=-2, norm=norm).real
    mirrored = half[..., 1 : (x.shape[-1] + 1) // 2].flip(-2, -1).roll(1, -2)
    return torch.cat([half, mirrored], -1)


@dataclass(frozen=True, repr=False)
class FNet(Mixer[tuple[()], tuple[()]]):
    """The real part of a two-dimensional Fourier transform over tokens and channels.

    Every output holds every token, so it can be neither causal nor blind to padding: the transform of a longer
    sequence is another one. Train and use it at one length, or without padding.

    Args:
        norm: ``"backward"`` (no scaling, as published) or ``"ortho"`` (divided by sqrt(n d)).
    """

    norm: Norm = "backward"

    traits = Traits(
        paper="Lee-Thorp et al. 2021, arXiv 2105.03824",
        formula="Re FFT_tokens(FFT_channels(x))",
        cost="n d (log n + log d)",
        order=1.0,
        reads="x",
        matrix=False,
    )

    def __post_init__(self) -> None:
        one_of(self, "norm", self.norm, Norm)

    def mix(self, x: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Both transforms."""
        return fourier_mix(x, norm=self.norm)
