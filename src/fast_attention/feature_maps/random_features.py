"""Random features of the softmax kernel: exp(x . y) = E[phi(x) . phi(y)], with x = q / d^(1/4), y = k / d^(1/4).

W (..., m, d) has m rows w ~ N(0, I_d). Factors common to all features of a token go into the logarithmic scale: for
queries they cancel, for keys they are one number each. Shapes: x (..., n, d) to features (..., n, m) or (..., n, 2m).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.heads import by_head
from fast_attention.engine.numerics import clamp, no_less
from fast_attention.feature_maps.feature_map import FeatureMap, Features, Logs


def draw(
    heads: int, rows: int, width: int, *, orthogonal: bool = True, regularised: bool = False
) -> Float[Tensor, "heads rows width"]:
    """Projections W, each row N(0, I): independent, or orthogonal within blocks of ``width`` rows.

    A block is a Haar rotation whose rows get the norms of fresh Gaussian vectors (arXiv 2009.14794, section 2.4).
    ``regularised`` gives every row the norm sqrt(width) instead (SMREG, Theorem 1).
    """
    dtype = torch.get_default_dtype()
    wide = torch.promote_types(dtype, torch.float32)  # torch decomposes no halves
    if orthogonal:
        blocks = -(-rows // width)
        Q, R = torch.linalg.qr(torch.randn(heads, blocks, width, width, dtype=wide))
        # Householder QR picks the signs of R's diagonal, so the raw Q is not uniform over rotations and positive
        # features would be biased by up to 23 %; with the signs of a positive diagonal it is.
        Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
        directions = Q.flatten(1, 2)[:, :rows].to(dtype)
    else:
        directions = F.normalize(torch.randn(heads, rows, width), dim=-1)
    if regularised:
        return directions * math.sqrt(width)
    return directions * torch.randn(heads, rows, width).norm(dim=-1, keepdim=True)


def trigonometric(x: Tensor, W: Tensor, phase: Tensor | None = None) -> Features:
    """``D m^(-1/2) [cos W x, sin W x]``, or ``D (2/m)^(1/2) cos(W x + b)``, b ~ U(0, 2 pi); ``D = e^(||x||^2 / 2)``.

    arXiv 2006.03555, section 2: features of the Gaussian kernel between the factors D.
    """
    x = clamp(x)
    z = by_head(x, W.to(x.dtype).mT)
    if phase is None:
        values, rows = torch.cat([z.cos(), z.sin()], -1), W.shape[-2]
    else:
        values, rows = (z + phase.to(x.dtype)[..., None, :]).cos(), W.shape[-2] / 2
    return Features(values, x.square().sum(-1) / 2 - math.log(rows) / 2)


def damped(
    W: Float[Tensor, "*heads rows width"], damping: Float[Tensor, "*heads"]
) -> tuple[Float[Tensor, "*heads rows width"], Float[Tensor, "*heads 1 rows"]]:
    """``B W`` and ``A ||w||^2 + log D``, with which ``positive`` makes the optimal positive features.

    Likhosherstov et al. 2022, arXiv 2205.15317: ``f(w, x) = D exp(A ||w||^2 + B w . x - ||x||^2 / 2)``, A = -damping,
    B = sqrt(1 - 4A), D = (1 - 4A)^(d/4). Unbiased for every damping of at least 0, one number for each head.
    """
    factor = (1 + 4 * damping)[..., None, None]
    bias = factor.log() * (W.shape[-1] / 4) - damping[..., None, None] * torch.linalg.vecdot(W, W)[..., None, :]
    return W * factor.sqrt(), bias


def positive(x: Tensor, W: Tensor, bias: Tensor | None = None, *, factor: float | None = None) -> Logs:
    """``m^(-1/2) exp(w . x - ||x||^2 / 2 + bias)``: FAVOR+'s features (arXiv 2009.14794, Lemma 1) where bias is None.

    ``bias`` is (..., 1, m), and ``factor`` another logarithm than that of m^(-1/2).
    """
    x = clamp(x)
    z = by_head(x, W.to(x.dtype).mT)
    if bias is not None:
        z = z + bias.to(x.dtype)
    factor = -math.log(z.shape[-1]) / 2 if factor is None else factor
    return Logs(z.sub_((x.square().sum(-1) / 2 - factor)[..., None]))


def generalised(x: Tensor, W: Tensor, kernel: FeatureMap, epsilon: float) -> Features | Logs:
    """``m^(-1/2) (f(W x) + epsilon)`` for a function f of single numbers (arXiv 2009.14794, section 2.2)."""
    z = by_head(x, W.to(x.dtype).mT)
    features = kernel.features(z)
    if isinstance(features, Logs):
        half_log = math.log(features.logs.shape[-1]) / 2
        least = features.logs.new_full((), math.log(epsilon)) if epsilon else None
        return Logs((features.logs if least is None else torch.logaddexp(features.logs, least)) - half_log)
    values, scale = features
    half_log = math.log(values.shape[-1]) / 2
    if scale is None:
        return Features((values + epsilon) * math.exp(-half_log))
    if epsilon == 0:
        return Features(values, scale - half_log)
    log_scale = no_less(scale, math.log(epsilon))
    values = values * (scale - log_scale).exp()[..., None] + epsilon * (-log_scale).exp()[..., None]
    return Features(values, log_scale - half_log)
