"""FAVOR++ (Likhosherstov et al. 2022, "Chefs' Random Tables"): positive features of least variance for the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention import checks
from fast_attention.engine.precision import widen
from fast_attention.feature_maps.random_features import damped, draw
from fast_attention.mechanism import Shape
from fast_attention.mechanisms.linear import sums
from fast_attention.mechanisms.linear.kernelised import TRAITS, CoreMap, Kernelised
from fast_attention.value import at_least


def favor_plus_plus_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    projection: Float[Tensor, "heads rows width"],
    damping: Float[Tensor, "heads"],
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Estimate ``softmax(Q K^T / sqrt(width)) V`` as ``phi(q_i)^T G / phi(q_i)^T g`` with optimal positive features.

    arXiv 2205.15317: ``phi(x) = m^(-1/2) D exp(A ||w||^2 + B w . x - ||x||^2 / 2)``, one entry for each row w of
    ``projection``, A = -damping, B = sqrt(1 - 4A), D = (1 - 4A)^(width/4), x = q / width^(1/4), y = k / width^(1/4);
    G sums ``phi(k_j) v_j^T`` and g ``phi(k_j)`` over the keys that query i may see. ``phi(x) . phi(y)`` has the mean
    ``exp(x . y)`` for every damping of at least 0; with 0 this is ``favor_plus_attention``. Stabilised by a running
    maximum, without any epsilon: no key moves a query before it. A query that sees nothing gets zeros.
    """
    return sums.of_map(_damped(DampedProjection(projection, damping)), q, k, v, key_mask, is_causal=is_causal)


def optimal_damping(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads keys width"],
    *,
    key_mask: Bool[Tensor, "*batch keys"] | None = None,
) -> Float[Tensor, "heads"]:
    """The damping with the least variance for queries and keys like these, one number for each head.

    arXiv 2205.15317: ``-A* = (1/rho - 1) / 8``, ``rho = (sqrt((d + 2p)^2 + 8 d p) - d - 2p) / (4p)``, p the mean of
    ``||x + y||^2`` over the pairs of a sequence, x = q / d^(1/4), y = k / d^(1/4). In float64. Not for traced code: it
    reads its inputs.

    Args:
        q: Queries (..., H, L, d).
        k: Keys (..., H, S, d).
        key_mask: Boolean (..., S), True = counts; where there are as many queries as keys it holds for both.

    Raises:
        ValueError: There is no pair to learn from, what is in them is not finite, or sizes do not fit.
    """
    checks.tensors(q=q, k=k)
    checks.heads(q, k, k, same_width=True)
    if key_mask is not None:
        checks.key_mask(key_mask, tuple(q.shape[:-3]), k)
    width = q.shape[-1]
    x, y = (t.detach().double() * width**-0.25 for t in (q, k))
    many, more = (t.new_full((*t.shape[:-3], 1), t.shape[-2]) for t in (x, y))
    if key_mask is not None:
        visible = key_mask[..., None, :, None]
        y, more = y.masked_fill(~visible, 0.0), key_mask.double().sum(-1, keepdim=True).expand_as(more)
        if x.shape[-2] == y.shape[-2]:
            x, many = x.masked_fill(~visible, 0.0), more
    total = more * x.square().sum((-2, -1)) + many * y.square().sum((-2, -1)) + 2 * (x.sum(-2) * y.sum(-2)).sum(-1)
    p = total.reshape(-1, total.shape[-1]).sum(0) / (many * more).sum()
    if not p.isfinite().all():
        raise ValueError(
            f"no damping follows from queries {tuple(q.shape)} and keys {tuple(k.shape)}: there must be a pair of them "
            "that key_mask leaves in, and all must be finite"
        )
    return _optimal(p, width)


def _optimal(p: Tensor, width: int) -> Tensor:
    """From the means of ``||x + y||^2``; rho is written so that p = 0 needs no limit."""
    rho = 2 * width / (((width + 2 * p).square() + 8 * width * p).sqrt() + width + 2 * p)
    return (1 / rho - 1) / 8


class DampedProjection(NamedTuple):
    """Rows w ~ N(0, I) of every head (H, m, d), drawn, and the factor -A on ``||w||^2`` (H,), fixed."""

    projection: Float[Tensor, "heads rows width"]
    damping: Float[Tensor, "heads"]


def _damped(w: DampedProjection) -> CoreMap:
    rows, bias = damped(*widen(w))
    return CoreMap.exponential(rows, bias=bias)


@dataclass(frozen=True, repr=False)
class FavorPlusPlus(Kernelised[DampedProjection]):
    """``FavorPlus`` with features of least variance for given queries and keys: unbiased too, and bounded.

    Each row's exponential is damped by its length; by how much follows from the mean of ``||q + k||^2`` of a head.
    The damping is part of the weights and never taken from a call's own keys: no key moves a query before it. Fresh
    weights suit queries and keys of unit scale, ``calibrated`` ones those it was given. Where ``FavorPlus`` beats
    uniform weights, the error is half or a third of its own; where norms are too large for that, damping is no remedy.

    Args:
        num_features: Rows of the projection, m.
        orthogonal: Rows orthogonal within blocks of ``head_dim`` rows rather than independent; lower variance.
    """

    num_features: int = 256
    orthogonal: bool = True

    traits = replace(
        TRAITS,
        paper="Likhosherstov et al. 2022, arXiv 2205.15317",
        formula="E[phi(q) . phi(k)] = exp(q . k / sqrt(d)), phi(x) = D exp(A |w|^2 + B w . x - |x|^2 / 2) / sqrt(m)",
        rotary=True,
        random=True,
        approximates="Softmax",
    )

    def __post_init__(self) -> None:
        at_least(self, "num_features", self.num_features, 1)

    def weights(self, shape: Shape) -> DampedProjection:
        """Draw the projection of every head; the damping is that for ``||q||^2 = ||k||^2 = head_dim``."""
        width = shape.head_dim
        damping = _optimal(torch.full((shape.heads,), 2 * width**0.5, dtype=torch.float64), width)
        projection = draw(shape.heads, self.num_features, width, orthogonal=self.orthogonal)
        return DampedProjection(projection, damping.to(projection.dtype))

    def redrawn(self, w: DampedProjection, shape: Shape) -> DampedProjection:
        """Another projection with the damping of ``w``."""
        return w._replace(projection=self.weights(shape).projection)

    def calibrated(
        self, q: Tensor, k: Tensor, w: DampedProjection, *, key_mask: Tensor | None = None
    ) -> DampedProjection:
        """``w`` with the damping of least variance for these queries and keys: see ``optimal_damping``.

        ``Bound.adopt`` puts it into a module.
        """
        self.check(self.traits, q, k, k, False, key_mask)
        return w._replace(damping=optimal_damping(q, k, key_mask=key_mask).to(w.damping))

    def core_map(self, w: DampedProjection) -> CoreMap:
        """Positive features of damped rows; one projection serves queries and keys."""
        return _damped(w)
