"""FAVOR, the first Performer (Choromanski et al. 2020, June): softmax attention from trigonometric random features."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import cummax
from fast_attention.feature_maps.features import Features
from fast_attention.feature_maps.random_features import draw, trigonometric
from fast_attention.mechanism import Shape, Traits, Unsupported
from fast_attention.mechanisms.linear import linear_state, reference, sums
from fast_attention.mechanisms.linear.kernelised import Map, RandomKernelised
from fast_attention.mechanisms.linear.linear_state import LinearState, Sums
from fast_attention.mechanisms.linear.random_feature_map import SINCOS, Heads, RandomFeatureMap
from fast_attention.traits import PLAIN
from fast_attention.value import at_least, one_of


def favor_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    projection: Float[Tensor, "heads rows width"],
    phase: Float[Tensor, "heads rows"] | None = None,
    *,
    clamp: float | None = None,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Estimate ``softmax(Q K^T / sqrt(width)) V`` as ``phi(q_i)^T G / phi(q_i)^T g`` with trigonometric features.

    arXiv 2006.03555: ``exp(x . y) = e^(||x||^2 / 2) E[cos(w . (x - y))] e^(||y||^2 / 2)``, x = q / width^(1/4),
    y = k / width^(1/4), over the rows w ~ N(0, I) of ``projection``; ``cos(w . x) cos(w . y) + sin(w . x) sin(w . y)``
    stands for the cosine, or ``2 cos(w . x + b) cos(w . y + b)`` where ``phase`` b ~ U(0, 2 pi) is given. Denominators
    are estimates of positive numbers and may come out negative: ``clamp`` (see ``Favor``). A query that sees nothing
    gets zeros.
    """
    if phase is None and clamp is None:
        return sums.of_random_features(SINCOS, Heads(projection), q, k, v, is_causal=is_causal, key_mask=key_mask)
    return _plain(q, k, v, projection, phase, clamp=clamp, is_causal=is_causal, key_mask=key_mask)


@in_float32
def _plain(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, phase: Tensor | None, *, clamp: float | None, is_causal: bool,
    key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    phi = _map(projection, phase)
    keys = reference.masked_keys(phi, k, key_mask)
    sums = reference.attend(phi(q).values, keys, v, is_causal=is_causal)
    if clamp is not None:
        assert keys.log_scale is not None
        largest = keys.log_scale.amax(-1, keepdim=True)
        if is_causal:
            largest = F.pad(cummax(keys.log_scale, -1), (q.shape[-2] - k.shape[-2], 0))
        sums = _clamped(sums, largest, projection, phase, clamp)
    return linear_state.normalise(sums)


def _map(projection: Tensor, phase: Tensor | None) -> Callable[[Tensor], Features]:
    return lambda x: trigonometric(x * x.shape[-1] ** -0.25, projection, phase)


def _clamped(sums: Sums, largest: Tensor, projection: Tensor, phase: Tensor | None, clamp: float) -> Sums:
    # the sums lack the features' factor, 1/m or 2/m, and are over e^largest, held fixed under differentiation
    rows = projection.shape[-2] if phase is None else projection.shape[-2] / 2
    least = clamp * rows * (largest - largest.detach()).exp()
    return Sums(sums.numerator, torch.maximum(sums.denominator, least))


class TrigonometricWeights(NamedTuple):
    """Rows w (H, m, d) and, for features with a phase, b (H, m); drawn."""

    projection: Tensor
    phase: Tensor | None


@dataclass(frozen=True, repr=False)
class Favor(RandomKernelised[TrigonometricWeights]):
    """Unbiased estimates of the exponentials from sines and cosines: good for short queries and keys only.

    Where ``||q||^2`` is near ``sqrt(width)`` or below, these features beat positive ones; at unit scale (``||q||^2``
    near the width) denominators come out negative and outputs useless. ``FavorPlus`` has no such trouble.

    Args:
        num_features: Rows of the projection, m. ``"sincos"`` makes two features of each, ``"phase"`` one.
        features: ``"sincos"``, or ``"phase"`` for the cosine with a random phase, never better per feature.
        orthogonal: Rows orthogonal within blocks of ``head_dim`` rows rather than independent; lower variance.
        clamp: Least value of a denominator, in units of ``e^((||q||^2 + ||k||^2) / (2 sqrt(width)))`` of the query and
            the longest key it sees; None leaves denominators alone.
    """

    num_features: int = 256
    features: Literal["sincos", "phase"] = "sincos"
    orthogonal: bool = True
    clamp: float | None = None

    traits = Traits(
        paper="Choromanski et al. 2020, arXiv 2006.03555",
        formula="phi(q) . phi(k) estimates exp(q . k / sqrt(d)); phi(x) = e^(|x|^2 / 2) [cos W x, sin W x] / sqrt(m)",
        cost="n m d",
        complexity_exponent=1.0,
        gpu=PLAIN,
        causal=True,
        padding=True,
        cross=True,
        rotary=True,
        memory="constant",
        random=True,
        approximates="Softmax",
    )

    def __post_init__(self) -> None:
        at_least(self, "num_features", self.num_features, 1)
        one_of(self, "features", self.features, ("sincos", "phase"))
        if self.clamp is not None:
            at_least(self, "clamp", self.clamp, 0.0)

    def parts_by_states(self, is_causal: bool) -> bool:
        """Not with a clamp: a state holds its unit without a gradient."""
        return self.clamp is None

    def weights(self, shape: Shape) -> TrigonometricWeights:
        """Draw the projection of every head, and its phases."""
        projection = draw(shape.heads, self.num_features, shape.head_dim, orthogonal=self.orthogonal)
        phased = self.features == "phase"
        phase = 2 * math.pi * torch.rand(shape.heads, self.num_features) if phased else None
        return TrigonometricWeights(projection, phase)

    def features_of(self, w: TrigonometricWeights) -> tuple[RandomFeatureMap, Heads] | None:
        """Sines and cosines of the same rows, unless there is a phase or a clamp."""
        return (SINCOS, Heads(w.projection)) if self.clamp is None and w.phase is None else None

    def maps(self, w: TrigonometricWeights) -> tuple[Map, Map]:
        """The maps of queries and of keys, with the factor 1 / m of sines and cosines with the queries."""
        if self.features_of(w) is not None:
            return super().maps(w)
        phi = _map(*w)
        return phi, phi

    @property
    def signed(self) -> bool:
        """Estimates of small weights come out negative."""
        return True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: TrigonometricWeights, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``favor_attention`` with these settings."""
        masks: Any = {"is_causal": is_causal, "key_mask": key_mask}
        if self.clamp is None:
            return super().attend(q, k, v, w, **masks)
        return favor_attention(q, k, v, *w, clamp=self.clamp, **masks)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: TrigonometricWeights, state: LinearState | None, *,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, LinearState]:  # fmt: skip
        """Outputs of the new tokens, and the sums over all keys up to their end."""
        if self.clamp is not None and state is not None and torch.is_grad_enabled() and state.k.requires_grad:
            raise Unsupported(f"{self!r}: a state holds the clamp's unit without a gradient; detach it, or use no_grad")
        if self.clamp is None:
            return super().advance(q, k, v, w, state, key_mask=key_mask)
        return _clamped_advance(q, k, v, w, state, key_mask, self.clamp)


@in_float32
def _clamped_advance(
    q: Tensor, k: Tensor, v: Tensor, w: TrigonometricWeights, state: LinearState | None, key_mask: Tensor | None,
    clamp: float,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    phi = _map(*w)
    keys = reference.masked_keys(phi, k, key_mask)
    sums, after = reference.advance(phi(q).values, keys, v, state)
    assert keys.log_scale is not None
    largest = keys.log_scale.cummax(-1).values
    largest = largest if state is None else torch.maximum(largest, state.log_scale)
    return linear_state.normalise(_clamped(sums, largest, *w, clamp)), after
