"""FAVOR, the first Performer (Choromanski et al. 2020, June): softmax attention from trigonometric random features."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import cummax
from fast_attention.feature_maps.features import Features
from fast_attention.feature_maps.random_features import draw, trigonometric
from fast_attention.mechanism import Shape, Unsupported
from fast_attention.mechanisms.linear import linear_state, reference
from fast_attention.mechanisms.linear.kernelised import TRAITS, CoreMap, Kernelised, Map
from fast_attention.mechanisms.linear.linear_state import LinearState, Sums
from fast_attention.traits import PLAIN
from fast_attention.value import at_least


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
    mechanism = Favor(clamp=clamp)
    return mechanism.attend(q, k, v, TrigonometricWeights(projection, phase), is_causal=is_causal, key_mask=key_mask)


@in_float32
def _clamped(
    q: Tensor, k: Tensor, v: Tensor, w: TrigonometricWeights, state: LinearState | None, key_mask: Tensor | None,
    clamp: float, *, is_causal: bool, advances: bool = False,
) -> tuple[Tensor, LinearState | None]:  # fmt: skip
    """Outputs, and with ``advances`` the state after the tokens."""
    phi = _map(*w)
    keys = reference.masked_keys(phi, k, key_mask)
    state = linear_state.empty(keys, v) if advances and state is None else state
    sums, after = reference.attend_behind(phi(q).values, keys, v, state, is_causal=is_causal)
    assert keys.log_scale is not None
    if is_causal:
        largest = F.pad(cummax(keys.log_scale, -1), (q.shape[-2] - k.shape[-2], 0))
        largest = largest if state is None else torch.maximum(largest, state.log_scale)
    else:
        largest = keys.log_scale.amax(-1, keepdim=True)
    # the sums lack the features' factor, 1/m or 2/m, and are over e^largest, held fixed under differentiation
    rows = w.projection.shape[-2] / (1 if w.phase is None else 2)
    least = clamp * rows * (largest - largest.detach()).exp()
    return linear_state.normalise(Sums(sums.numerator, torch.maximum(sums.denominator, least))), after


def _map(projection: Tensor, phase: Tensor | None) -> Callable[[Tensor], Features]:
    return lambda x: trigonometric(x * x.shape[-1] ** -0.25, projection, phase)


class TrigonometricWeights(NamedTuple):
    """Rows w (H, m, d) and, for features with a phase, b (H, m); drawn."""

    projection: Tensor
    phase: Tensor | None


@dataclass(frozen=True, repr=False)
class Favor(Kernelised[TrigonometricWeights]):
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

    traits = replace(
        TRAITS,
        paper="Choromanski et al. 2020, arXiv 2006.03555",
        formula="phi(q) . phi(k) estimates exp(q . k / sqrt(d)); phi(x) = e^(|x|^2 / 2) [cos W x, sin W x] / sqrt(m)",
        gpu=PLAIN,
        rotary=True,
        random=True,
        approximates="Softmax",
    )

    def __post_init__(self) -> None:
        at_least(self, "num_features", self.num_features, 1)
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

    def core_map(self, w: TrigonometricWeights) -> CoreMap | None:
        """Sines and cosines of the same rows, unless there is a phase or a clamp."""
        return CoreMap.trigonometric(w.projection) if self.clamp is None and w.phase is None else None

    def maps(self, w: TrigonometricWeights) -> tuple[Map, Map]:
        """The maps of queries and of keys, with the factor 1 / m of sines and cosines with the queries."""
        if self.core_map(w) is not None:
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
        if self.clamp is None:
            return super().attend(q, k, v, w, is_causal=is_causal, key_mask=key_mask)
        return _clamped(q, k, v, w, None, key_mask, self.clamp, is_causal=is_causal)[0]

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: TrigonometricWeights, state: LinearState | None, *,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, LinearState]:  # fmt: skip
        """Outputs of the new tokens, and the sums over all keys up to their end."""
        if self.clamp is None:
            return super().advance(q, k, v, w, state, key_mask=key_mask)
        if state is not None and torch.is_grad_enabled() and state.k.requires_grad:
            raise Unsupported(f"{self!r}: a state holds the clamp's unit without a gradient; detach it, or use no_grad")
        out, after = _clamped(q, k, v, w, state, key_mask, self.clamp, is_causal=True, advances=True)
        assert after is not None
        return out, after
