"""FAVOR+, the Performer (Choromanski et al. 2020, September): softmax attention from positive random features."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.kernelised import Kernelised, Map
from fast_attention.mechanism import Shape, Traits
from fast_attention.ops.favor import favor_paths
from fast_attention.ops.favor.favor_blocks import Lift
from fast_attention.ops.linear import linear
from fast_attention.ops.linear.linear import LinearState
from fast_attention.ops.maps.features import FeatureMap, Features, as_feature_map
from fast_attention.ops.maps.random_features import draw, generalised
from fast_attention.ops.precision import in_float32
from fast_attention.ops.value import at_least, one_of


@in_float32
def favor_plus_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    projection: Float[Tensor, "heads rows width"],
    *,
    hyperbolic: bool = False,
    damping: float = 0.0,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Estimate ``softmax(Q K^T / sqrt(width)) V`` as ``phi(q_i)^T G / phi(q_i)^T g`` with positive features.

    arXiv 2009.14794, Lemma 1: ``exp(x . y) = E[phi(x) . phi(y)]``, ``phi(x) = m^(-1/2) exp(W x - ||x||^2 / 2)``,
    x = q / width^(1/4), y = k / width^(1/4), rows of W = ``projection`` N(0, I); G sums ``phi(k_j) v_j^T`` and g
    ``phi(k_j)`` over the keys that query i may see. ``hyperbolic`` uses W and -W; ``damping`` as in ``FavorPlus``.
    Stabilised by a running maximum, without any epsilon: no key moves a query before it. A query that sees nothing
    gets zeros.
    """
    lift = Lift("hyperbolic" if hyperbolic else "positive", damping)
    return favor_paths.attend(lift, q, k, v, projection, is_causal=is_causal, key_mask=key_mask)


@in_float32
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
    return _attend(_generalised_map(projection, kernel, kernel_epsilon), q, k, v, is_causal, key_mask)


def _generalised_map(projection: Tensor, kernel: FeatureMap, epsilon: float) -> Callable[[Tensor], Features]:
    return lambda x: generalised(x * x.shape[-1] ** -0.25, projection, kernel, epsilon)


def _attend(
    phi: Callable[[Tensor], Features], q: Tensor, k: Tensor, v: Tensor, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    keys = linear.masked_keys(phi, k, key_mask)
    return linear.normalise(linear.attend(phi(q).values, keys, v, is_causal=is_causal))


def optimal_damping(q: Float[Tensor, "*batch length width"], k: Float[Tensor, "*batch keys width"]) -> float:
    """The ``damping`` with the least variance for queries and keys like these (arXiv 2205.15317).

    ``(1/rho - 1) / 8`` with ``rho = 2 d / (sqrt((d + 2p)^2 + 8 d p) + d + 2p)`` and p the mean of ``||x + y||^2`` over
    all pairs, x = q / width^(1/4), y = k / width^(1/4). Not for traced code: it reads its inputs.
    """
    width = q.shape[-1]
    x, y = (t.detach().double().flatten(0, -2) * width**-0.25 for t in (q, k))
    p = float(x.square().sum(-1).mean() + y.square().sum(-1).mean() + 2 * x.mean(0) @ y.mean(0))
    rho = 2 * width / (math.sqrt((width + 2 * p) ** 2 + 8 * width * p) + width + 2 * p)
    return (1 / rho - 1) / 8


class Projection(NamedTuple):
    """Rows w ~ N(0, I) of every head (H, m, d); drawn."""

    projection: Tensor


@dataclass(frozen=True, repr=False)
class FavorPlus(Kernelised[Projection]):
    """Unbiased estimates of the exponentials from positive random features: linear time, a state of constant size.

    The error falls as 1/m and grows fast with the norms of queries and keys: small where ``||q||^2`` stays near
    ``sqrt(width)``; at unit scale (``||q||^2`` near the width) 256 features do not beat uniform weights untrained.
    Where logits reach several hundreds, a query whose features meet those of no key within floating-point range
    gets zeros.

    Args:
        num_features: Rows of the projection, m; the official default. ``"hyperbolic"`` makes two features of each.
        features: ``"positive"``, or ``"hyperbolic"`` for W and -W: less than half the variance at twice the features.
        orthogonal: Rows orthogonal within blocks of ``head_dim`` rows rather than independent; lower variance.
        regularised: Rows of norm sqrt(head_dim) (SMREG): a slightly smaller kernel with lighter tails.
        damping: Factor on ``||w||^2`` in the exponent, at least 0 (``-A`` of the optimal positive features): still
            unbiased, features bounded. ``optimal_damping(q, k)`` gives the best for your data.
        kernel: None estimates softmax. ``Relu()`` or any other map or function of numbers f makes features
            ``f(W x) + kernel_epsilon`` of another kernel instead.
        kernel_epsilon: Added to the features of ``kernel``, at least 0.
    """

    num_features: int = 256
    features: Literal["positive", "hyperbolic"] = "positive"
    orthogonal: bool = True
    regularised: bool = False
    damping: float = 0.0
    kernel: FeatureMap | Callable[[Tensor], Tensor] | None = None
    kernel_epsilon: float = 1e-3

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """As every linear attention; an approximation of softmax unless a kernel is given."""
        return Traits(
            paper="Choromanski et al. 2020, arXiv 2009.14794",
            formula="phi(q) . phi(k) estimates exp(q . k / sqrt(d)); phi(x) = exp(W x - |x|^2 / 2) / sqrt(m)",
            cost="n m d",
            order=1.0,
            causal=True,
            padding=True,
            cross=True,
            rotary=self.kernel is None,
            memory="constant",
            random=True,
            approximates="Softmax" if self.kernel is None else None,
        )

    def __post_init__(self) -> None:
        at_least(self, "num_features", self.num_features, 1)
        one_of(self, "features", self.features, ("positive", "hyperbolic"))
        at_least(self, "damping", self.damping, 0.0)
        at_least(self, "kernel_epsilon", self.kernel_epsilon, 0.0)
        if self.regularised and self.damping:
            raise ValueError(f"{self!r}: damping acts on the norms of the rows, which regularised=True makes all equal")
        if self.kernel is not None:
            object.__setattr__(self, "kernel", as_feature_map(self, "kernel", self.kernel))
            if self.features != "positive" or self.damping:
                raise ValueError(f"{self!r}: features and damping shape the softmax kernel; leave them with a kernel")

    def weights(self, shape: Shape) -> Projection:
        """Draw the projection of every head."""
        settings = {"orthogonal": self.orthogonal, "regularised": self.regularised}
        return Projection(draw(shape.heads, self.num_features, shape.head_dim, **settings))

    @property
    def _lift(self) -> Lift:
        return Lift(self.features, self.damping)

    def maps(self, w: Projection) -> tuple[Map, Map]:
        """One map for both; the factors that its own normaliser cancels are with the queries."""
        if isinstance(self.kernel, FeatureMap):
            phi = _generalised_map(w.projection, self.kernel, self.kernel_epsilon)
            return phi, phi
        lift, W = self._lift, w.projection
        return (lambda x: lift.whole(x, W)), (lambda x: lift.plain(x, W))

    @property
    def signed(self) -> bool:
        """As the kernel says; exponentials are positive."""
        return isinstance(self.kernel, FeatureMap) and self.kernel.signed

    @in_float32
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: Projection, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``favor_plus_attention``, or ``generalised_attention`` where a kernel is given, with these settings."""
        if self.kernel is None:
            return favor_paths.attend(self._lift, q, k, v, w.projection, is_causal=is_causal, key_mask=key_mask)
        return super().attend(q, k, v, w, is_causal=is_causal, key_mask=key_mask)

    @in_float32
    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Projection, state: LinearState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Outputs of the stretch, and the sums over all keys up to its end."""
        if self.kernel is None:
            return favor_paths.advance(self._lift, q, k, v, w.projection, state, key_mask)
        return super().advance(q, k, v, w, state, key_mask=key_mask)
