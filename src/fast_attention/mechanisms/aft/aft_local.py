"""AFT-local (Zhai et al. 2021, section 3.2): biases in a window only, learned per position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fast_attention.engine import dispatch, masks
from fast_attention.engine.blocks import narrow
from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.aft import fast_window, reference, reference_biased
from fast_attention.mechanisms.aft.reference import same_width
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


class WindowState(NamedTuple):
    """State for decoding: the last ``window - 1`` keys, and in front of them the pool of all earlier ones as a key."""

    scores: Float[Tensor, "*batch window width"]
    both: Float[Tensor, "*batch window both"]
    position: Int[Tensor, ""]  # tokens so far


def one_row(
    biases: Float[Tensor, "#heads 1 window"],
    scores: Float[Tensor, "*batch heads keys width"],
    both: Float[Tensor, "*batch heads keys both"],
    *,
    strict: bool,
) -> Float[Tensor, "*batch heads 1 both"]:
    """The sums of one new token, up to a factor, over its window and the row of all earlier keys in front of it."""
    if strict:
        scores, both = scores[..., 1:, :], both[..., 1:, :]
    else:
        biases = F.pad(biases, (1, 0))
    scores = scores + biases.mT
    return reference.pooled(scores, both).sums


def advanced(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, state: WindowState | None, *, strict: bool, key_mask: Tensor | None
) -> tuple[Tensor, WindowState]:
    """The outputs of N new tokens after ``state``, and the state after them; ``band`` (heads or 1, N or 1, taps)."""
    window, length = band.shape[-1] // 2 + 1, k.shape[-2]
    scores, both = reference.terms(k, v, key_mask)
    if state is None:
        start = (0, 0, window, 0)
        scores, both = F.pad(scores, start, value=FLOOR), F.pad(both, start)
        position = torch.zeros((), dtype=torch.long, device=k.device)
    else:
        scores, both = torch.cat([state.scores, scores], -2), torch.cat([state.both, both], -2)
        position = state.position
    if not symbolic() and length == 1:
        dispatch.record("one token against its window", "decoding token by token", window=window)
        sums = one_row(band[..., :window], scores, both, strict=strict)
    else:
        if band.shape[-2] > 1:
            band = F.pad(band, (0, 0, window, 0))
        sums = reference_biased.windowed(band, scores, both, is_causal=True, strict=strict)[..., window:, :]
    past = reference.pooled(scores[..., : length + 1, :], both[..., : length + 1, :])
    scores, both = reference.prepended(past, scores[..., length + 1 :, :], both[..., length + 1 :, :])
    return q.sigmoid() * reference.mean(sums, v.shape[-1]), WindowState(scores, both, position + length)


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
