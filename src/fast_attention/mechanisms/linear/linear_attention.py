"""Linear attention (Katharopoulos et al. 2020): features instead of the exponential, so that keys are summed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.feature_maps.feature_map import Elementwise
from fast_attention.feature_maps.features import EluPlusOne, FeatureMap, as_feature_map
from fast_attention.mechanisms.linear import decayed, sums
from fast_attention.mechanisms.linear.kernelised import TRAITS, CoreMap, Kernelised, Map
from fast_attention.value import at_least


def linear_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    feature_map: FeatureMap = EluPlusOne(),  # noqa: B008
    eps: float = 1e-6,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``phi(q_i)^T S / (phi(q_i)^T z + eps)`` with ``S = sum_j phi(k_j) v_j^T`` and ``z = sum_j phi(k_j)``.

    arXiv 2006.16236, Eqs. 5 and 6; the sums run over the keys that query i may see. No 1/sqrt(width), as in the
    authors' code. A map whose scale is kept apart (``Exp``) needs no ``eps`` and gets none. A query that sees nothing
    gets zeros.
    """
    core_map = CoreMap.of(feature_map)
    if core_map is not None:
        return sums.of_map(core_map, q, k, v, key_mask, eps=eps, is_causal=is_causal)
    return LinearAttention(feature_map, eps).attend(q, k, v, (), is_causal=is_causal, key_mask=key_mask)


@dataclass(frozen=True, repr=False)
class LinearAttention(Kernelised[tuple[()]]):
    """Attention with a kernel of few features in place of the exponential: linear time, a state of constant size.

    Args:
        feature_map: The map phi of queries and keys: ``EluPlusOne()``, ``Relu()``, ``Exp()``, ``SoftmaxMap()``,
            ``Quadratic()``, ``Taylor()``, ``DPFP()``, ``Identity()``, your own ``FeatureMap``, or any function of a
            tensor (wrapped in ``Custom``). Maps that can be negative leave the denominators unprotected.
        eps: Added to the denominators, at least 0; in the units of ``phi(q) . phi(k)``. Not used by ``Exp``.
    """

    feature_map: FeatureMap | Callable[[Tensor], Tensor] = EluPlusOne()  # noqa: RUF009
    eps: float = 1e-6

    unordered = True
    traits = TRAITS

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_map", as_feature_map(self, "feature_map", self.feature_map))
        at_least(self, "eps", self.eps, 0.0)

    @property
    def _map(self) -> FeatureMap:
        return self.feature_map  # type: ignore[return-value]

    def maps(self, w: tuple[()]) -> tuple[Map, Map]:
        """One map for queries and keys; only ``Exp`` and ``Taylor`` have the scale of softmax's exponential."""
        return self._map.features, self._map.features

    def core_map(self, w: tuple[()]) -> CoreMap | None:
        """A map of single numbers."""
        return CoreMap.of(self._map)

    @property
    def signed(self) -> bool:
        """Whether the map may be negative."""
        return self._map.signed

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """By kernels of sums that decay: to nothing where a sequence begins."""
        if not isinstance(self._map, Elementwise):
            return None
        settings: Any = {"phi": self._map, "normalize": True, "eps": self.eps, "is_causal": is_causal}
        logs = q.new_zeros(*q.shape[:-1], 1, dtype=torch.float32)
        return decayed.attend_packed(q, k, v, logs, lengths, key_mask, **settings)
