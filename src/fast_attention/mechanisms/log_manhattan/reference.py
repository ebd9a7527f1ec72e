"""Log and Manhattan attention as sums over keys, plain and differentiable, with their states for decoding.

Log attention: ``sum_j s_ij v_j`` with ``s_ij = a_i + b_j``. Manhattan: ``sum_j (l_j - l_i) x_j = S1 - l_i S0``, the l
relative to an anchor, the first visible key: only differences count, and large l would cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.chunks import first_visible
from fast_attention.engine.scan import prefix_sums
from fast_attention.engine.tracing import replaced
from fast_attention.mechanisms.aft import reference as pool

Mask = Bool[Tensor, "*#batch2 keys"]


class KeySums(NamedTuple):
    """State of log attention: sums over keys of 1, v_j, b_j v_j and b_j, side by side in one row."""

    sums: Float[Tensor, "*batch 1 sums"]


def terms(
    b: Float[Tensor, "*batch keys weights"], v: Float[Tensor, "*batch keys values"], key_mask: Mask | None
) -> Float[Tensor, "*batch keys sums"]:
    """The summands of ``KeySums``, a row for each key; zeros for masked ones. ``weights`` is ``values`` or 1."""
    v, b = masks.drop(v, key_mask), masks.drop(b, key_mask)
    return torch.cat([pool.visible_ones(b[..., :1], key_mask), v, b * v, b], -1)


def read(
    a: Float[Tensor, "*batch length weights"], sums: Float[Tensor, "*batch rows sums"], values: int, *, normalized: bool
) -> Float[Tensor, "*batch length values"]:
    """``sum_j s_ij v_j``, over ``sum_j s_ij`` with ``normalized``, from sums of n keys: ``(a S0 + S1) / (n a + B)``."""
    count, plain, weighted, scores = sums.split([1, values, values, sums.shape[-1] - 1 - 2 * values], -1)
    numerator = a * plain + weighted
    return pool.quotient(numerator, count * a + scores) if normalized else numerator


class Differences(NamedTuple):
    """State of signed Manhattan attention; ``anchor`` and ``first`` belong to the first visible key, zeros before."""

    anchor: Float[Tensor, "*batch 1 weights"]  # l of the first key
    first: Float[Tensor, "*batch 1 values"]  # ``h v`` of the first key
    number: Float[Tensor, "*batch rows 1"]  # visible keys
    plain: Float[Tensor, "*batch rows values"]  # S0 = sum_j x_j
    weighted: Float[Tensor, "*batch rows values"]  # S1 = sum_j (l_j - anchor) x_j


def signed(
    l: Float[Tensor, "*batch keys weights"],
    x: Float[Tensor, "*batch keys values"],
    key_mask: Mask | None,
    *,
    is_causal: bool,
) -> Float[Tensor, "*batch keys values"]:
    """``sum_j (l_j - l_i) x_j`` for every i over the keys that it may see; the x of others must be zero."""
    return relative(l, (running if is_causal else summarised)(l, x, x, key_mask))


def relative(l: Float[Tensor, "*batch keys weights"], sums: Differences) -> Float[Tensor, "*batch keys values"]:
    """``sum_j (l_j - l_i) x_j`` from the sums that every i sees."""
    return sums.weighted - (l - sums.anchor) * sums.plain


def anchored(
    l: Float[Tensor, "*batch keys weights"],
    diagonal: Float[Tensor, "*batch keys values"],
    key_mask: Mask | None,
    earlier: Differences | None = None,
) -> tuple[Float[Tensor, "*batch 1 weights"], Float[Tensor, "*batch 1 values"]]:
    """l and ``diagonal`` of the first visible key, which may be an earlier one; zeros where there is none."""
    anchor, first = (first_visible(masks.drop(y, key_mask), key_mask) for y in (l, diagonal))
    if earlier is None:
        return anchor, first
    known = earlier.number > 0
    return torch.where(known, earlier.anchor, anchor), torch.where(known, earlier.first, first)


def running(
    l: Float[Tensor, "*batch keys weights"],
    x: Float[Tensor, "*batch keys values"],
    diagonal: Float[Tensor, "*batch keys values"],
    key_mask: Mask | None,
    earlier: Differences | None = None,
) -> Differences:
    """The sums up to every key, as many rows as keys; of ``diagonal`` (``h v``) the first visible row is kept."""
    anchor, first = anchored(l, diagonal, key_mask, earlier)
    count, plain, weighted = (prefix_sums(y) for y in (pool.visible_ones(l[..., :1], key_mask), x, (l - anchor) * x))
    if earlier is not None:
        count, plain, weighted = count + earlier.number, plain + earlier.plain, weighted + earlier.weighted
    return Differences(anchor, first, count, plain, weighted)


def summarised(
    l: Float[Tensor, "*batch keys weights"],
    x: Float[Tensor, "*batch keys values"],
    diagonal: Float[Tensor, "*batch keys values"],
    key_mask: Mask | None,
) -> Differences:
    """The sums over all keys, one row."""
    anchor, first = anchored(l, diagonal, key_mask)
    sums = (y.sum(-2, keepdim=True) for y in (pool.visible_ones(l[..., :1], key_mask), x, (l - anchor) * x))
    return Differences(anchor, first, *sums)


def last(rows: Differences) -> Differences:
    """The last row alone."""
    return replaced(rows, **{name: getattr(rows, name)[..., -1:, :] for name in ("number", "plain", "weighted")})


def combined(earlier: Differences, later: Differences) -> Differences:
    """The sums of two neighbouring chunks; associative."""
    known = earlier.number > 0
    anchor = torch.where(known, earlier.anchor, later.anchor)
    weighted = earlier.weighted + later.weighted + (later.anchor - anchor) * later.plain
    first = torch.where(known, earlier.first, later.first)
    return Differences(anchor, first, earlier.number + later.number, earlier.plain + later.plain, weighted)
