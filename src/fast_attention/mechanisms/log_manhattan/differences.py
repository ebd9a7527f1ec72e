"""Sums of signed differences, ``sum_j (l_j - l_i) x_j = S1 - l_i S0``: two sums of keys that combine as a monoid.

The l are kept relative to an anchor, the first key that was seen: only differences count, and large l would cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch, masks
from fast_attention.engine.chunks import chunks, first_visible
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.scan import prefix_sums
from fast_attention.engine.tracing import replaced
from fast_attention.feature_maps.positive import Positive
from fast_attention.mechanisms.log_manhattan import difference_passes
from fast_attention.mechanisms.log_manhattan.difference_passes import How

Mask = Bool[Tensor, "*#batch2 keys"]


class Differences(NamedTuple):
    """What keys leave behind; ``anchor`` and ``first`` are those of the first key that may be seen, else zeros."""

    anchor: Float[Tensor, "*batch 1 weights"]  # l of the first key
    first: Float[Tensor, "*batch 1 values"]  # what came with the first key
    number: Float[Tensor, "*batch rows 1"]  # keys seen
    plain: Float[Tensor, "*batch rows values"]  # S0 = sum_j x_j
    weighed: Float[Tensor, "*batch rows values"]  # S1 = sum_j (l_j - anchor) x_j


def signed(
    l: Float[Tensor, "*batch keys weights"],
    x: Float[Tensor, "*batch keys values"],
    key_mask: Mask | None,
    *,
    is_causal: bool,
) -> Float[Tensor, "*batch keys values"]:
    """``sum_j (l_j - l_i) x_j`` for every i over the keys that it may see; the x of others must be zero."""
    if is_causal:
        return related(l, running(l, x, x, key_mask))
    count = seen(l[..., :1], key_mask).sum(-2, keepdim=True).clamp(min=1.0)
    l = l - masks.drop(l, key_mask).sum(-2, keepdim=True).detach() / count
    return (l * x).sum(-2, keepdim=True) - l * x.sum(-2, keepdim=True)


def related(l: Float[Tensor, "*batch keys weights"], sums: Differences) -> Float[Tensor, "*batch keys values"]:
    """``sum_j (l_j - l_i) x_j`` from the sums that every i sees."""
    return sums.weighed - (l - sums.anchor) * sums.plain


def running(
    l: Float[Tensor, "*batch keys weights"],
    x: Float[Tensor, "*batch keys values"],
    own: Float[Tensor, "*batch keys values"],
    key_mask: Mask | None,
    earlier: Differences | None = None,
) -> Differences:
    """The sums up to every key, as many rows as keys; ``own`` comes with each key, and the first one's is kept."""
    anchor, first = first_visible(masks.drop(l, key_mask), key_mask), first_visible(masks.drop(own, key_mask), key_mask)
    if earlier is not None:
        known = earlier.number > 0
        anchor, first = torch.where(known, earlier.anchor, anchor), torch.where(known, earlier.first, first)
    count, plain, weighed = (prefix_sums(y) for y in (seen(l[..., :1], key_mask), x, (l - anchor) * x))
    if earlier is not None:
        count, plain, weighed = count + earlier.number, plain + earlier.plain, weighed + earlier.weighed
    return Differences(anchor, first, count, plain, weighed)


def summarised(
    l: Float[Tensor, "*batch keys weights"],
    x: Float[Tensor, "*batch keys values"],
    own: Float[Tensor, "*batch keys values"],
    key_mask: Mask | None,
) -> Differences:
    """The sums over all keys, one row."""
    anchor, first = first_visible(masks.drop(l, key_mask), key_mask), first_visible(masks.drop(own, key_mask), key_mask)
    parts = (y.sum(-2, keepdim=True) for y in (seen(l[..., :1], key_mask), x, (l - anchor) * x))
    return Differences(anchor, first, *parts)


def last(rows: Differences) -> Differences:
    """The last row alone."""
    return replaced(rows, **{name: getattr(rows, name)[..., -1:, :] for name in ("number", "plain", "weighed")})


def combined(earlier: Differences, later: Differences) -> Differences:
    """The sums of two neighbouring stretches; associative."""
    known = earlier.number > 0
    anchor = torch.where(known, earlier.anchor, later.anchor)
    weighed = earlier.weighed + later.weighed + (later.anchor - anchor) * later.plain
    first = torch.where(known, earlier.first, later.first)
    return Differences(anchor, first, earlier.number + later.number, earlier.plain + later.plain, weighed)


def seen(like: Float[Tensor, "*batch keys weights"], key_mask: Mask | None) -> Float[Tensor, "*batch keys weights"]:
    """1 for keys that may be seen, 0 for others."""
    return masks.drop(torch.ones_like(like), key_mask)


def attend(
    k: Float[Tensor, "*batch keys weights"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Mask | None,
    feature_map: Positive,
    *,
    mean: bool,
    is_causal: bool,
) -> Float[Tensor, "*batch keys values"]:
    """``h_i v_i + sum_j (l_j - l_i) v_j`` with h of ``feature_map``; the sum over the number of keys with ``mean``."""
    how = How(feature_map.both, mean, is_causal)
    if torch.compiler.is_compiling() or not (feature_map.fixed and _even(k, v)):
        dispatch.record("whole tensors at a time", "no CPU, or a map with something to learn")
        return _plain(k, v, key_mask, how=how)
    name, why = ("prefix sums", "causal") if is_causal else ("sums over all keys", "every token sees the same keys")
    dispatch.record(f"{name}, stretch by stretch", why, stretch=chunks(v)[0].stop)
    return _RULE(k, v, key_mask, how=how)


def _even(k: Tensor, v: Tensor) -> bool:
    return k.shape[:-2] == v.shape[:-2] and v.device.type == "cpu" and min(k.numel(), v.numel()) > 0


def _plain(k: Tensor, v: Tensor, key_mask: Tensor | None, *, how: How) -> Tensor:
    (h, l), x = how.both(k), masks.drop(v, key_mask)
    related = signed(l, x, key_mask, is_causal=how.is_causal)
    if how.mean:
        ones = seen(l[..., :1], key_mask)
        count = prefix_sums(ones) if how.is_causal else ones.sum(-2, keepdim=True)
        related = related / count.clamp(min=1.0)
    return masks.drop(h, key_mask) * x + related


_RULE = CustomGradient(_plain, difference_passes.forward, difference_passes.backward)
