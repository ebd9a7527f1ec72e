"""Decays of tokens, from the weights of a head and, where tokens have their own, from their keys."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.precision import in_float32


class Gates(NamedTuple):
    """A token decays by ``sigmoid(logit + rows . k)``, for each channel where ``rows`` are so many for a head."""

    logit: Float[Tensor, "heads *channels"]
    rows: Float[Tensor, "heads *channels width"] | None


class Decay(NamedTuple):
    """The logarithms by which every token decays what was before it: in float32 or better whatever the keys are."""

    logs: Float[Tensor, "*batch length *channels"]


@in_float32
def decay(k: Tensor, w: Gates, key_mask: Tensor | None) -> Decay:
    """By how much every token decays what was before it; by nothing where it is masked."""
    if w.logit.ndim > 1:
        assert w.rows is not None
        logit = w.logit[:, None].to(k.dtype) + k @ w.rows.mT.to(k.dtype)
        return Decay(unmasked(F.logsigmoid(logit), key_mask, by_channel=True))
    logit = w.logit[..., None].to(k.dtype)
    if w.rows is not None:
        logit = logit + (k @ w.rows.to(k.dtype)[..., None])[..., 0]
    return Decay(unmasked(F.logsigmoid(logit).expand(k.shape[:-1]), key_mask))


def unmasked(log_decay: Tensor, key_mask: Tensor | None, *, by_channel: bool = False) -> Tensor:
    """``log_decay`` (..., L), or (..., L, C) ``by_channel``; nothing at masked tokens."""
    if key_mask is None:
        return log_decay
    return log_decay.masked_fill(~(key_mask[..., None] if by_channel else key_mask), 0.0)


def columns(log_decay: Tensor, k: Tensor) -> Tensor:
    """``log_decay`` (..., L) as (..., L, 1); with a number for each channel of the keys, as it is."""
    return log_decay if log_decay.ndim == k.ndim else log_decay[..., None]
