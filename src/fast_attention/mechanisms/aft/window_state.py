"""What decoding keeps of AFT with biases in a window: the last keys, and one key that stands for all earlier ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanisms.aft import reference, reference_biased


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
