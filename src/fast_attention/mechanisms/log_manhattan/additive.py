"""Attention whose scores are sums of a query's and a key's part, ``s_ij = a_i + b_j``: a few sums do for all pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch, masks
from fast_attention.engine.chunks import chunks
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.scan import prefix_sums
from fast_attention.mechanisms.aft import pool
from fast_attention.mechanisms.log_manhattan import additive_passes
from fast_attention.mechanisms.log_manhattan.additive_passes import How


class KeySums(NamedTuple):
    """Sums over keys of 1, v_j, b_j v_j and b_j, side by side in one row."""

    sums: Float[Tensor, "*batch 1 both"]


def terms(
    b: Float[Tensor, "*batch keys weights"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
) -> Float[Tensor, "*batch keys both"]:
    """What is summed, a row for each key; zeros for masked ones. ``weights`` is ``values`` or 1."""
    v, b = masks.drop(v, key_mask), masks.drop(b, key_mask)
    return torch.cat([pool.seen(b[..., :1], key_mask), v, b * v, b], -1)


def read(
    a: Float[Tensor, "*batch length weights"], sums: Float[Tensor, "*batch rows both"], values: int, *, normalized: bool
) -> Float[Tensor, "*batch length values"]:
    """``sum_j s_ij v_j``, over ``sum_j s_ij`` with ``normalized``, from sums of n keys: ``(a S0 + S1) / (n a + B)``."""
    count, plain, weighed, parts = sums.split([1, values, values, sums.shape[-1] - 1 - 2 * values], -1)
    numerator = a * plain + weighed
    return pool.quotient(numerator, count * a + parts) if normalized else numerator


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
    *,
    part: Callable[[Tensor], Tensor],
    fixed: bool,
    normalized: bool,
    is_causal: bool,
) -> Float[Tensor, "*batch length values"]:
    """``read`` with ``a = part(q)``, ``b = part(k)`` and the sums over all keys, or over those up to each query.

    ``fixed``: ``part`` holds nothing to learn, so that the pass over stretches of the sequence may map them again.
    """
    how = How(part, normalized, is_causal)
    if torch.compiler.is_compiling() or not (fixed and _even(q, k, v, is_causal=is_causal)):
        dispatch.record(
            "whole tensors at a time", "no CPU, unequal lengths when causal, or a map with something to learn"
        )
        return _plain(q, k, v, key_mask, how=how)
    name, why = ("prefix sums", "causal") if is_causal else ("sums over all keys", "every query sees the same keys")
    dispatch.record(f"{name}, stretch by stretch", why, stretch=chunks(v)[0].stop)
    return _RULE(q, k, v, key_mask, how=how)


def _even(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> bool:
    alike = q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and (not is_causal or q.shape[-2] == k.shape[-2])
    return alike and q.device.type == "cpu" and min(q.numel(), v.numel()) > 0


def _plain(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, how: How) -> Tensor:
    rows = terms(how.part(k), v, key_mask)
    rows = pool.aligned(prefix_sums(rows), q.shape[-2]) if how.is_causal else rows.sum(-2, keepdim=True)
    return read(how.part(q), rows, v.shape[-1], normalized=how.normalized)


_RULE = CustomGradient(_plain, additive_passes.forward, additive_passes.backward)
