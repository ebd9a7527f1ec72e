"""Attention whose scores are sums of a query's and a key's part, ``s_ij = a_i + b_j``: a few sums do for all pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.ops import masks, pool


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
