"""AFT-simple in plain differentiable operations: softmax pooling, channel by channel, as a monoid that cannot overflow.

``sum_j exp(s_j) v_j / sum_j exp(s_j)``, over all keys (``pooled``) or over those up to each (``running``).

Values and the mask travel together: ``terms`` puts them side by side, (..., S, Ev + C), and every sum of them is a
numerator beside its denominator. Scores have C = Ev channels, or C = 1 that serves all values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks
from fast_attention.engine.decay import decayed_sums, spread
from fast_attention.engine.scan import FLOOR, running_max
from fast_attention.engine.tracing import symbolic


class Pool(NamedTuple):
    """State for decoding: sums over keys; the true ones are ``exp(log_scale)`` times ``sums``."""

    log_scale: Float[Tensor, "*batch length weights"]  # the largest score so far; FLOOR where no key was seen
    sums: Float[Tensor, "*batch length sums"]  # numerators, then denominators


def visible_ones(
    scores: Float[Tensor, "*batch keys weights"], key_mask: Bool[Tensor, "*#batch2 keys"] | None
) -> Tensor:
    """1 for visible keys, 0 for masked ones, in the shape of ``scores``."""
    ones = torch.ones_like(scores)
    return ones if key_mask is None else ones.masked_fill(~key_mask[..., None], 0.0)


def terms(
    scores: Float[Tensor, "*batch keys weights"],
    values: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
) -> tuple[Float[Tensor, "*batch keys weights"], Float[Tensor, "*batch keys sums"]]:
    """Scores, masked ones at ``FLOOR``, and values beside ones, masked rows zero."""
    values_and_ones = torch.cat([masks.drop(values, key_mask), visible_ones(scores, key_mask)], -1)
    return masked_scores(scores, key_mask), values_and_ones


def masked_scores(
    scores: Float[Tensor, "*batch keys weights"], key_mask: Bool[Tensor, "*#batch2 keys"] | None
) -> Tensor:
    """Scores, masked ones at ``FLOOR``."""
    return scores if key_mask is None else scores.masked_fill(~key_mask[..., None], FLOOR)


def weighted(scores: Tensor, values_and_ones: Tensor, log_scale: Tensor) -> Tensor:
    """``exp(score - log_scale)`` times values and ones."""
    return spread((scores - log_scale).exp(), values_and_ones.shape[-1]) * values_and_ones


def pooled(scores: Float[Tensor, "*batch keys weights"], values_and_ones: Float[Tensor, "*batch keys sums"]) -> Pool:
    """The pool of all keys, one row."""
    log_scale = scores.detach().amax(-2, keepdim=True)
    return Pool(log_scale, weighted(scores, values_and_ones, log_scale).sum(-2, keepdim=True))


def running(scores: Float[Tensor, "*batch keys weights"], values_and_ones: Float[Tensor, "*batch keys sums"]) -> Pool:
    """The pool of all keys up to each, as many rows as keys.

    Every row has the maximum of its past as log scale, so that neither a huge key to come nor one long gone can
    underflow what a row sums.
    """
    log_scale = running_max(scores.detach())
    return Pool(log_scale, decayed_sums(weighted(scores, values_and_ones, log_scale), log_scale))


def prepended(
    pool: Pool | None, scores: Float[Tensor, "*batch keys weights"], values_and_ones: Float[Tensor, "*batch keys sums"]
) -> tuple[Tensor, Tensor]:
    """Keys with the row of an earlier pool in front of them, as if it were one more key."""
    if pool is None:
        return F.pad(scores, (0, 0, 1, 0), value=FLOOR), F.pad(values_and_ones, (0, 0, 1, 0))
    return torch.cat([pool.log_scale, scores], -2), torch.cat([pool.sums, values_and_ones], -2)


def combined(earlier: Pool, later: Pool) -> Pool:
    """The pool of two neighbouring chunks; associative."""
    log_scale = torch.maximum(earlier.log_scale, later.log_scale)
    width = earlier.sums.shape[-1]
    a, b = (spread((pool.log_scale - log_scale).exp(), width) for pool in (earlier, later))
    return Pool(log_scale, a * earlier.sums + b * later.sums)


def mean(sums: Float[Tensor, "*batch length sums"], values: int) -> Float[Tensor, "*batch length values"]:
    """Numerators, the first ``values`` channels, over denominators; zeros where no key is visible."""
    return quotient(sums[..., :values], sums[..., values:])


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Numerators over denominators; zeros where the denominator is zero."""
    zero = denominator == 0
    return (numerator / denominator.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def with_ones(k: Tensor, v: Tensor) -> Tensor:
    """Values beside ones, zeros for keys at ``FLOOR``."""
    return torch.cat([v, (k > FLOOR / 2).to(v.dtype)], -1)


def last_rows(rows: Float[Tensor, "*batch keys values"], length: int) -> Float[Tensor, "*batch length values"]:
    """The last ``length`` rows, as causal queries end where the keys end; zeros in front where there are fewer."""
    if not symbolic() and rows.shape[-2] == length:
        return rows
    return F.pad(rows, (0, 0, length - rows.shape[-2], 0))


def same_width(owner: object, x: Tensor, v: Tensor, *, name: str = "keys", or_one: bool = False) -> None:
    """Raise a ``ValueError`` unless every channel of the values has its own in ``x`` (or, ``or_one``, shares one)."""
    got, values = x.shape[-1], v.shape[-1]
    if got != values and not (or_one and got == 1):
        raise ValueError(
            f"{owner!r} pairs every channel of the values with its own channel of the {name}: the widths must be equal"
            f"{', or the first 1' if or_one else ''}; got {name} of width {got} and values of width {values}"
        )
