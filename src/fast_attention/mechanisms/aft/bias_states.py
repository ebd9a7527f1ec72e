"""Decoding of AFT with biases in a window: the last keys as they are, all earlier ones as one pool."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import traced
from fast_attention.mechanisms.aft import biased, pool


class WindowState(NamedTuple):
    """The last ``window - 1`` keys and, in front of them, the pool of all earlier ones as if it were one more key."""

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
    """The sums of the last token, up to a factor, over its window and, in front of it, the row of all earlier keys."""
    if strict:
        scores, both = scores[..., 1:, :], both[..., 1:, :]
    else:
        biases = F.pad(biases, (1, 0))
    scores = scores + biases.mT
    return pool.pooled(scores, both).sums


def advanced(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, state: WindowState | None, *, strict: bool, key_mask: Tensor | None
) -> tuple[Tensor, WindowState]:
    """The outputs of a stretch of N tokens that follows ``state``; ``band`` (heads or 1, N or 1, taps) is theirs."""
    window, length = band.shape[-1] // 2 + 1, k.shape[-2]
    scores, both = pool.terms(k, v, key_mask)
    if state is None:
        start = (0, 0, window, 0)
        scores, both = F.pad(scores, start, value=FLOOR), F.pad(both, start)
        position = torch.zeros((), dtype=torch.long, device=k.device)
    else:
        scores, both = torch.cat([state.scores, scores], -2), torch.cat([state.both, both], -2)
        position = state.position
    if not traced() and length == 1:
        dispatch.record("one token against its window", "decoding token by token", window=window)
        sums = one_row(band[..., :window], scores, both, strict=strict)
    else:
        if band.shape[-2] > 1:
            band = F.pad(band, (0, 0, window, 0))
        sums = biased.windowed(band, scores, both, is_causal=True, strict=strict)[..., window:, :]
    past = pool.pooled(scores[..., : length + 1, :], both[..., : length + 1, :])
    scores, both = pool.behind(past, scores[..., length + 1 :, :], both[..., length + 1 :, :])
    return q.sigmoid() * pool.mean(sums, v.shape[-1]), WindowState(scores, both, position + length)
