"""Decays of tokens, from the weights of a head and, where tokens have their own, from their keys."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.precision import in_float32


class Gates(NamedTuple):
    """A token decays by ``sigmoid(logit + rows . k)``: logits (H,), and rows (H, d) where tokens have their own."""

    logit: Float[Tensor, "heads"]
    rows: Float[Tensor, "heads width"] | None


class Decay(NamedTuple):
    """The logarithms by which every token decays what was before it: in float32 or better whatever the keys are."""

    logs: Float[Tensor, "*batch length"]


@in_float32
def decay(k: Tensor, w: Gates, key_mask: Tensor | None) -> Decay:
    """By how much every token decays what was before it; by nothing where it is masked."""
    logit = w.logit[..., None].to(k.dtype)
    if w.rows is not None:
        logit = logit + (k @ w.rows.to(k.dtype)[..., None])[..., 0]
    return Decay(unmasked(F.logsigmoid(logit).expand(k.shape[:-1]), key_mask))


def unmasked(log_decay: Tensor, key_mask: Tensor | None) -> Tensor:
    """``log_decay`` (..., L), nothing at masked tokens."""
    return log_decay if key_mask is None else log_decay.masked_fill(~key_mask, 0.0)
