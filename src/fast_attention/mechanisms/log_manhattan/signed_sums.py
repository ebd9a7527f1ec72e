"""Sums over pairs of tokens weighed by how far their log keys lie apart: the mathematics of Manhattan attention.

Jiang and Zuo, "Fast Attention", Eqs. 11-12. With h(k) > 0 and ``l = log h(k)``, channel by channel or 1 wide.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.positive import Positive, PositiveSoftplus
from fast_attention.mechanisms.log_manhattan import differences, sorting

Mask = Bool[Tensor, "*#batch2 length"]
Distance = Literal["signed", "l1", "laplacian"]
SUMS: dict[Distance, sorting.Sums | None] = {"signed": None, "l1": sorting.absolute, "laplacian": sorting.laplacian}


@in_float32
def signed_manhattan(
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    is_causal: bool = False,
    key_mask: Mask | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``sum_j (log h(k_j) - log h(k_i)) v_j``, the relative term of Eq. 12; width is ``values`` or 1; time O(n d)."""
    return differences.signed(feature_map.log(k), masks.drop(v, key_mask), key_mask, is_causal=is_causal)


@in_float32
def absolute_manhattan(
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    is_causal: bool = False,
    key_mask: Mask | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``sum_j |log h(k_j) - log h(k_i)| v_j``; width is ``values`` or 1; time O(n log n d), causal O(n log^2 n d)."""
    return sorting.over(feature_map.log(k), masks.drop(v, key_mask), sorting.absolute, is_causal=is_causal)


@in_float32
def laplacian_manhattan(
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    temperature: float = 1.0,
    is_causal: bool = False,
    key_mask: Mask | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``sum_j exp(-|log h(k_j) - log h(k_i)| / temperature) v_j``; sizes and time as ``absolute_manhattan``."""
    l = feature_map.log(k) / temperature
    return sorting.over(l, masks.drop(v, key_mask), sorting.laplacian, is_causal=is_causal)


@in_float32
def vector_manhattan(
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    feature_map: Positive = PositiveSoftplus(),  # noqa: B008
    is_causal: bool = False,
    key_mask: Mask | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``sum_j ||log h(k_j) - log h(k_i)||_1 v_j``: one weight for all values, the L1 distance of whole keys.

    Time O(width n (log n + values)), one sort for each channel of the keys; causal a factor log n more.
    """
    return sorting.vector_absolute(feature_map.log(k), masks.drop(v, key_mask), is_causal=is_causal)


class Past(NamedTuple):
    """All keys so far: order statistics have no smaller state."""

    logs: Float[Tensor, "*batch keys weights"]
    values: Float[Tensor, "*batch keys values"]  # zeros for masked keys
    ones: Float[Tensor, "*batch keys weights"]  # likewise


def appended(past: Past | None, logs: Tensor, values: Tensor, ones: Tensor) -> Past:
    """All keys, those of a stretch included."""
    new = Past(logs, values, ones)
    return new if past is None else Past(*(torch.cat(pair, -2) for pair in zip(past, new, strict=True)))


def pairs(
    l: Float[Tensor, "*batch length weights"],
    x: Float[Tensor, "*batch length values"],
    ones: Float[Tensor, "*batch length weights"],
    past: Past | None,
    *,
    distance: Distance,
    masses: bool,
    is_causal: bool,
) -> tuple[Float[Tensor, "*batch length values"], Float[Tensor, "*batch length masses"]]:
    """``sum_j w_ij x_j`` and ``sum_j |w_ij|`` over past and stretch, by sorting; w of ``distance``.

    Without ``masses`` the second is empty where it would cost more.
    """
    sums = SUMS[distance]
    absolute = sums or sorting.absolute
    y = (torch.cat([x, ones], -1) if masses else x) if sums else ones
    out = sorting.over(l, y, absolute, is_causal=is_causal)
    if past is not None:
        y = (torch.cat([past.values, past.ones], -1) if masses else past.values) if sums else past.ones
        out = out + sorting.over_others(past.logs, y, l, absolute)
    if sums:
        return out[..., : x.shape[-1]], out[..., x.shape[-1] :]
    now = appended(past, l, x, ones)
    signed = differences.signed(now.logs, now.values, now.ones[..., 0] > 0, is_causal=is_causal)
    return signed[..., -l.shape[-2] :, :], out
