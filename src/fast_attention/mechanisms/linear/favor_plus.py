"""FAVOR+, the Performer (Choromanski et al. 2020, September): softmax attention from positive random features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.feature_maps.feature_map import FeatureMap, Features, Logs
from fast_attention.feature_maps.features import as_feature_map
from fast_attention.feature_maps.random_features import draw, generalised
from fast_attention.mechanism import Shape, Traits
from fast_attention.mechanisms.linear import sums
from fast_attention.mechanisms.linear.kernelised import TRAITS, CoreMap, Kernelised, Map
from fast_attention.value import at_least


def favor_plus_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    projection: Float[Tensor, "heads rows width"],
    *,
    hyperbolic: bool = False,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Estimate ``softmax(Q K^T / sqrt(width)) V`` as ``phi(q_i)^T G / phi(q_i)^T g`` with positive features.

    arXiv 2009.14794, Lemma 1: ``exp(x . y) = E[phi(x) . phi(y)]``, ``phi(x) = m^(-1/2) exp(W x - ||x||^2 / 2)``,
    x = q / width^(1/4), y = k / width^(1/4), rows of W = ``projection`` N(0, I); G sums ``phi(k_j) v_j^T`` and g
    ``phi(k_j)`` over the keys that query i may see. ``hyperbolic`` uses W and -W.
    Stabilised by a running maximum, without any epsilon: no key moves a query before it. A query that sees nothing
    gets zeros.
    """
    core_map = CoreMap.exponential(projection, hyperbolic=hyperbolic)
    return sums.of_map(core_map, q, k, v, key_mask, is_causal=is_causal)


def generalised_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    projection: Float[Tensor, "heads rows width"],
    *,
    kernel: FeatureMap,
    kernel_epsilon: float = 1e-3,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``phi(q_i)^T G / phi(q_i)^T g`` with ``phi(x) = m^(-1/2) (f(W x) + kernel_epsilon)`` for any function f.

    arXiv 2009.14794, section 2.2, x = q / width^(1/4), y = k / width^(1/4); G sums ``phi(k_j) v_j^T`` and g
    ``phi(k_j)`` over the keys that query i may see. A query that sees nothing gets zeros.
    """
    mechanism = FavorPlus(kernel=kernel, kernel_epsilon=kernel_epsilon)
    return mechanism.attend(q, k, v, Projection(projection), is_causal=is_causal, key_mask=key_mask)


class Projection(NamedTuple):
    """Rows w ~ N(0, I) of every head (H, m, d); drawn."""

    projection: Tensor


OTHER_KERNEL = replace(
    TRAITS,
    paper="Choromanski et al. 2020, arXiv 2009.14794",
    formula="phi(q) . phi(k) estimates exp(q . k / sqrt(d)); phi(x) = exp(W x - |x|^2 / 2) / sqrt(m)",
    random=True,
)
SOFTMAX_KERNEL = replace(OTHER_KERNEL, rotary=True, approximates="Softmax")


@dataclass(frozen=True, repr=False)
class FavorPlus(Kernelised[Projection]):
    """Unbiased estimates of the exponentials from positive random features: linear time, a state of constant size.

    The error falls as 1/m and grows fast with the norms of queries and keys: small where ``||q||^2`` stays near
    ``sqrt(width)``; at unit scale (``||q||^2`` near the width) 256 features do not beat uniform weights untrained.
    Whatever the scale, sums are divided by their largest terms: the estimate neither overflows nor vanishes.

    Args:
        num_features: Rows of the projection, m; the official default. ``"hyperbolic"`` makes two features of each.
        features: ``"positive"``, or ``"hyperbolic"`` for W and -W: less than half the variance at twice the features.
        orthogonal: Rows orthogonal within blocks of ``head_dim`` rows rather than independent; lower variance.
        regularised: Rows of norm sqrt(head_dim) (SMREG): a slightly smaller kernel with lighter tails.
        kernel: None estimates softmax. ``Relu()`` or any other map or function of numbers f makes features
            ``f(W x) + kernel_epsilon`` of another kernel instead.
        kernel_epsilon: Added to the features of ``kernel``, at least 0.
    """

    num_features: int = 256
    features: Literal["positive", "hyperbolic"] = "positive"
    orthogonal: bool = True
    regularised: bool = False
    kernel: FeatureMap | Callable[[Tensor], Tensor] | None = None
    kernel_epsilon: float = 1e-3

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of linear attention; an approximation of softmax unless a kernel is given."""
        return SOFTMAX_KERNEL if self.kernel is None else OTHER_KERNEL

    def __post_init__(self) -> None:
        at_least(self, "num_features", self.num_features, 1)
        at_least(self, "kernel_epsilon", self.kernel_epsilon, 0.0)
        if self.kernel is not None:
            object.__setattr__(self, "kernel", as_feature_map(self, "kernel", self.kernel))
            if self.features != "positive":
                raise ValueError(f"{self!r}: features shape the softmax kernel; leave them with a kernel")

    def weights(self, shape: Shape) -> Projection:
        """Draw the projection of every head."""
        settings = {"orthogonal": self.orthogonal, "regularised": self.regularised}
        return Projection(draw(shape.heads, self.num_features, shape.head_dim, **settings))

    def core_map(self, w: Projection) -> CoreMap | None:
        """Positive features, unless a kernel is given; one projection serves queries and keys."""
        if self.kernel is not None:
            return None
        return CoreMap.exponential(w.projection, hyperbolic=self.features == "hyperbolic")

    def maps(self, w: Projection) -> tuple[Map, Map]:
        """One map for both, unless the factors that its own normaliser cancels are with the queries."""
        kernel = self.kernel
        if not isinstance(kernel, FeatureMap):
            return super().maps(w)

        def phi(x: Tensor) -> Features | Logs:
            return generalised(x * x.shape[-1] ** -0.25, w.projection, kernel, self.kernel_epsilon)

        return phi, phi

    @property
    def signed(self) -> bool:
        """Whether the kernel may be negative; exponentials are positive."""
        return isinstance(self.kernel, FeatureMap) and self.kernel.signed
