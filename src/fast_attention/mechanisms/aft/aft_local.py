"""AFT with biases in a window only (Zhai et al. 2021, sections 3.2 and 3.4): learned per position, or a convolution."""

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
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import bias_windows, pool
from fast_attention.mechanisms.aft.bias_states import WindowState, advanced
from fast_attention.mechanisms.aft.pool import same_width
from fast_attention.value import at_least


@in_float32
def aft_local(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads length width"],
    v: Float[Tensor, "*batch heads length width"],
    band: Float[Tensor, "#heads2 #length2 taps"],
    *,
    strict: bool = False,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch heads length width"]:
    """``sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)`` with ``w_ij = 0`` outside a window.

    arXiv 2105.14103, Eq. 4. ``band`` (heads or 1, length or 1, taps), taps odd: ``band[h, i, o]`` is the bias of key
    ``i + o - taps // 2``; keys further away have bias 0, or are not seen at all with ``strict`` (a different and, in
    the paper, a worse model). Time O(length taps width). A query that sees nothing gets zeros.
    """
    k, v = pool.hidden(k, key_mask), masks.drop(v, key_mask)
    return bias_windows.windowed(q, k, v, band, is_causal=is_causal, strict=strict, holes=key_mask is not None)


def conv_band(
    kernel: Float[Tensor, "heads taps"], gain: Float[Tensor, " heads"], shift: Float[Tensor, " heads"]
) -> Float[Tensor, "heads 1 taps"]:
    """``gain (w - mean w) / std w + shift``, head by head: AFT-conv's kernel (arXiv 2105.14103, section 3.4)."""
    centred = kernel - kernel.mean(-1, keepdim=True)
    unit = F.normalize(centred, dim=-1) * kernel.shape[-1] ** 0.5  # of standard deviation 1; 0 for equal taps
    return (gain[:, None] * unit + shift[:, None])[:, None]


class Band(NamedTuple):
    """A bias for every position and every key less than a window away, for all heads and channels."""

    band: Float[Tensor, "max_len taps"]


@dataclass(frozen=True, repr=False)
class AFTLocal(Attention[Band, WindowState]):
    """AFT with learned biases for nearby pairs of positions; keys further away are seen with bias 0.

    Keys, queries and values must have the same width.

    Args:
        window: Tokens i and j have a learned bias where ``|i - j| < window`` (1: the diagonal only).
        strict: Do not see tokens outside the window at all.
    """

    window: int = 32
    strict: bool = False

    traits = Traits(
        paper="Zhai et al. 2021, arXiv 2105.14103",
        formula="sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij), w_ij = 0 for |i - j| >= w",
        cost="n w d",
        order=1.0,
        causal=True,
        padding=True,
        memory="window",
        bounded=True,
        matrix=False,  # a matrix for each channel
        learned=True,
    )

    def __post_init__(self) -> None:
        at_least(self, "window", self.window, 1)

    def weights(self, shape: Shape) -> Band:
        """Biases from N(0, 0.01^2)."""
        return Band(nn.Parameter(0.01 * torch.randn(shape.max_len, 2 * self.window - 1)))

    def heads_of(self, w: Band) -> None:
        """None: the biases are those of all heads, however many."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Band, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """``aft_local`` with the learned bias."""
        same_width(self, k, v)
        self.within(k.shape[-2], w.band.shape[0])
        band = narrow(w.band, k.shape[-2], axis=0)[None]
        return aft_local(q, k, v, band, strict=self.strict, is_causal=is_causal, key_mask=key_mask)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Band, state: WindowState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, WindowState]:
        """Outputs of the stretch, and the last keys with the pool of those before them."""
        same_width(self, k, v)
        start = 0 if state is None else int(state.position)
        self.within(start + k.shape[-2], w.band.shape[0])
        band = narrow(w.band, k.shape[-2], axis=0, start=start)[None]
        return advanced(q, k, v, band, state, strict=self.strict, key_mask=key_mask)


class ConvKernel(NamedTuple):
    """A kernel for every head, normalised, scaled and shifted."""

    kernel: Float[Tensor, "heads taps"]
    gain: Float[Tensor, " heads"]
    shift: Float[Tensor, " heads"]


@dataclass(frozen=True, repr=False)
class AFTConv(Attention[ConvKernel, WindowState]):
    """AFT whose bias depends on the distance only: a convolution with one kernel per head, for any length.

    The kernel is ``gain (w - mean w) / std w + shift``; gain and shift start at 0, so that training starts from
    AFT-simple. Keys further away than half a kernel are seen with bias 0. Causal calls use the half of the kernel that
    looks back. Keys, queries and values must have the same width.

    Args:
        kernel_size: Positions under the kernel, centred on the query: odd, at least 3.
    """

    kernel_size: int = 11

    traits = Traits(
        paper="Zhai et al. 2021, arXiv 2105.14103",
        formula="sigmoid(q_i) * sum_j exp(k_j + w_(j-i)) v_j / sum_j exp(k_j + w_(j-i)), w = 0 outside the kernel",
        cost="n w d",
        order=1.0,
        causal=True,
        padding=True,
        memory="window",
        matrix=False,  # a matrix for each channel
        learned=True,
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

    @in_float32
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: ConvKernel, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``aft_local`` with the kernel as every position's band."""
        same_width(self, k, v)
        return aft_local(q, k, v, conv_band(*w), is_causal=is_causal, key_mask=key_mask)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: ConvKernel, state: WindowState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, WindowState]:
        """Outputs of the stretch, and the last keys with the pool of those before them."""
        same_width(self, k, v)
        return advanced(q, k, v, conv_band(*w), state, strict=False, key_mask=key_mask)
