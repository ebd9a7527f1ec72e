"""FNet (Lee-Thorp et al. 2021): mixes tokens and channels by a Fourier transform, with nothing to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine.operation import Fast, Operation
from fast_attention.mechanism import Mixer, Traits
from fast_attention.traits import FOURIER

Norm = Literal["backward", "ortho"]


def fourier_mix(
    x: Float[Tensor, "*batch length width"], *, norm: Norm = "backward"
) -> Float[Tensor, "*batch length width"]:
    """``Re F_seq(F_hidden(x))`` (arXiv 2105.03824), in O(n d (log n + log d)).

    ``norm="backward"`` does not scale, as published; ``"ortho"`` divides by sqrt(n d), so that norms never grow.
    Of the hidden axis only the first half is transformed along the sequence: x being real, ``Re Y[m, n] =
    Re Y[-m, -n]`` gives the rest.
    """
    return _mixed(x, ortho=norm == "ortho")


def half_spectrum(x: Tensor, *, ortho: bool) -> Tensor:
    """Half of the spectrum over tokens, and the other half mirrored."""
    norm = "ortho" if ortho else "backward"
    half = torch.fft.fft(torch.fft.rfft(x, dim=-1, norm=norm), dim=-2, norm=norm).real
    mirrored = half[..., 1 : (x.shape[-1] + 1) // 2].flip(-2, -1).roll(1, -2)
    return torch.cat([half, mirrored], -1)


def _forward(x: Tensor, *, ortho: bool, keep: bool) -> tuple[Tensor, tuple[()]]:
    return half_spectrum(x, ortho=ortho), ()


def _backward(inputs: Any, outputs: Any, saved: Any, gradients: tuple[Tensor, ...], *, ortho: bool) -> tuple[Tensor]:
    """Transform the gradient: the matrix cos(2 pi (m l / n + h k / d)) is symmetric."""
    return (half_spectrum(gradients[0], ortho=ortho),)


def _sizes(x: Tensor, *, ortho: bool) -> dict[str, int]:
    return {"columns": x.shape[-1] // 2 + 1}


PATH = "rfft over channels, FFT over tokens"
_mixed = Operation(
    half_spectrum,
    cpu=Fast(_forward, _backward, path=PATH, why="half of the spectrum mirrors the other", sizes=_sizes),
    compute=torch.float32,
    empty=lambda x, *, ortho: torch.empty_like(x, memory_format=torch.contiguous_format),
    path=PATH,
    sizes=_sizes,
)


@dataclass(frozen=True, repr=False)
class FNet(Mixer[tuple[()], tuple[()]]):
    """The real part of a two-dimensional Fourier transform over tokens and channels.

    Every output depends on every token, so it can neither be causal nor ignore padding: the transform of a longer
    sequence is another one. Train and use it at one length, or without padding.

    Args:
        norm: ``"backward"`` (no scaling, as published) or ``"ortho"`` (divided by sqrt(n d)).
    """

    norm: Norm = "backward"

    traits = Traits(
        paper="Lee-Thorp et al. 2021, arXiv 2105.03824",
        formula="Re FFT_tokens(FFT_channels(x))",
        cost="n d (log n + log d)",
        complexity_exponent=1.0,
        gpu=FOURIER,
        inputs="x",
        matrix=False,
    )

    def mix(self, x: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Transform channels and tokens."""
        return fourier_mix(x, norm=self.norm)
