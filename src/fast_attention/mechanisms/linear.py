"""Linear attention (Katharopoulos et al. 2020): features instead of the exponential, so that keys are summed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.mechanism import Attention, Traits
from fast_attention.ops import linear, masks
from fast_attention.ops.features import EluPlusOne, FeatureMap, Features, as_feature_map
from fast_attention.ops.linear import LinearState
from fast_attention.ops.precision import in_float32
from fast_attention.ops.value import at_least


@in_float32
def linear_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    feature_map: FeatureMap = EluPlusOne(),  # noqa: B008 (a frozen value)
    eps: float = 1e-6,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``phi(q_i)^T S / (phi(q_i)^T z + eps)``, ``S = sum_j phi(k_j) v_j^T``, ``z = sum_j phi(k_j)``.

    arXiv 2006.16236, Eqs. 5 and 6, over the keys j <= i where causal (Eqs. 9 to 12). No 1/sqrt(width), as in the
    authors' code. A feature map whose scale is kept apart (``Exp``) is normalised without ``eps``. A query that sees
    nothing gets zeros.
    """
    sums = linear.attend(feature_map.features(q).values, _keys(k, feature_map, key_mask), v, is_causal=is_causal)
    return linear.normalise(_regularise(sums, feature_map, q, eps))
