"""AFT-conv (Zhai et al. 2021): biases that depend on the distance only, a convolution for each head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.engine.precision import widen
from fast_attention.mechanism import Shape
from fast_attention.mechanisms.aft.aft_local import AFTLocal, Banded, WindowState
from fast_attention.value import at_least


def conv_band(
    kernel: Float[Tensor, "heads taps"], gain: Float[Tensor, " heads"], shift: Float[Tensor, " heads"]
) -> Float[Tensor, "heads 1 taps"]:
    """``gain (w - mean w) / std w + shift``, head by head: AFT-conv's kernel (arXiv 2105.14103)."""
    centred = kernel - kernel.mean(-1, keepdim=True)
    normal = F.normalize(centred, dim=-1) * kernel.shape[-1] ** 0.5  # of standard deviation 1; 0 for equal taps
    return (gain[:, None] * normal + shift[:, None])[:, None]


class ConvKernel(NamedTuple):
    """A kernel for every head, normalised, scaled and shifted."""

    kernel: Float[Tensor, "heads taps"]
    gain: Float[Tensor, " heads"]
    shift: Float[Tensor, " heads"]


@dataclass(frozen=True, repr=False)
class AFTConv(Banded):
    """AFT whose bias depends on the distance only: a convolution with one kernel per head, for any length.

    The kernel is ``gain (w - mean w) / std w + shift``; gain and shift start at 0, so that training starts from
    AFT-simple. Keys further away than half a kernel are seen with bias 0. Causal calls use the half of the kernel that
    looks back. Keys, queries and values must have the same width.

    Args:
        kernel_size: Positions under the kernel, centred on the query: odd, at least 3.
    """

    kernel_size: int = 11

    traits = replace(
        AFTLocal.traits,
        formula="sigmoid(q_i) * sum_j exp(k_j + w_(j-i)) v_j / sum_j exp(k_j + w_(j-i)), w = 0 outside the kernel",
        positions="relative",
        needs_max_len=False,
    )

    def __post_init__(self) -> None:
        at_least(self, "kernel_size", self.kernel_size, 3)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"{self!r}: kernel_size must be odd, for the kernel is centred on the query")

    def weights(self, shape: Shape) -> ConvKernel:
        """Kernels from N(0, 0.01^2), gain and shift 0."""
        kernel = nn.Parameter(0.01 * torch.randn(shape.heads, self.kernel_size))
        gain, shift = (nn.Parameter(torch.zeros(shape.heads)) for _ in range(2))
        return ConvKernel(kernel, gain, shift)

    def band(self, w: ConvKernel, length: int, state: WindowState | None = None) -> Tensor:
        """The kernel, at every position."""
        return conv_band(*widen(w))
