"""The sums over pairs of tokens inside Manhattan attention, weighed by how far their log keys lie apart.

Jiang and Zuo, "Fast Attention", Eqs. 11-12. With h(k) > 0 and ``l = log h(k)``, channel by channel or 1 wide.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.positive import Positive, PositiveSoftplus
from fast_attention.mechanisms.log_manhattan import reference, sorting

Mask = Bool[Tensor, "*#batch2 length"]


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
    return reference.signed(feature_map.log(k), masks.drop(v, key_mask), key_mask, is_causal=is_causal)


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
