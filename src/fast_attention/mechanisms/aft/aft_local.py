"""AFT-local (Zhai et al. 2021, section 3.2): biases in a window only, learned per position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from fast_attention.engine import masks
from fast_attention.engine.blocks import narrow
from fast_attention.engine.precision import in_float32
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import fast_window, reference
from fast_attention.mechanisms.aft.reference import same_width
from fast_attention.mechanisms.aft.window_state import WindowState, advanced
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
    ``i + o - taps // 2``; keys further away have bias 0, or are masked with ``strict`` (a different and, in
    the paper, a worse model). Time O(length taps width). A query that sees nothing gets zeros.
    """
    if band.shape[-1] % 2 == 0:
        raise ValueError(f"band has shape {tuple(band.shape)}: its last size, the taps, must be odd")
    k, v = reference.masked_scores(k, key_mask), masks.drop(v, key_mask)
    any_masked = key_mask is not None
    return fast_window.windowed(q, k, v, band, is_causal=is_causal, strict=strict, any_masked=any_masked)


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
        """Outputs of new tokens, and the last keys with the pool of all earlier ones."""
        same_width(self, k, v)
        start = 0 if state is None else int(state.position)
        self.within(start + k.shape[-2], w.band.shape[0])
        band = narrow(w.band, k.shape[-2], axis=0, start=start)[None]
        return advanced(q, k, v, band, state, strict=self.strict, key_mask=key_mask)
