"""FAVOR (arXiv 2006.03555) and FAVOR+ (2009.14794): estimated kernels, pair by pair, never stabilised."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracles.linear import average, visible


def trigonometric(m: Any, x: Tensor, y: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """The estimate of exp(x . y) from the Gaussian kernel: D_x B D_y with B an average of cosines."""
    if m.features == "phase":
        assert b is not None
        terms = 2 * torch.cos(W @ x + b) * torch.cos(W @ y + b)
    else:
        terms = torch.cos(W @ (x - y))  # cos cos + sin sin
    return (x @ x / 2 + y @ y / 2).exp() * terms.mean()


def favor(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    x, y = q / len(q[0]) ** 0.25, k / len(q[0]) ** 0.25
    W, b = w.projection[head], None if w.phase is None else w.phase[head]
    rows = []
    for i in range(len(q)):
        seen = visible(i, len(q), len(k), is_causal, key_mask)
        weights = [trigonometric(m, x[i], y[j], W, b) for j in seen]
        total: Any = sum(weights)
        if m.clamp is not None and seen:
            largest = torch.stack([y[j] @ y[j] / 2 for j in seen]).max()
            least = m.clamp * (x[i] @ x[i] / 2 + largest).exp()
            total = torch.where(total < least, least, total)
        rows.append(average(weights, [v[j] for j in seen], v[0], total))
    return torch.stack(rows)


def elementwise(kernel: Any, z: Tensor) -> Tensor:
    match type(kernel).__name__:
        case "Relu":
            return torch.where(z > 0, z, 0 * z) + kernel.offset
        case "EluPlusOne":
            return torch.where(z > 0, z + 1, z.clamp(max=0).exp())
        case "Identity":
            return z
        case "Exp":
            return z.exp()
        case name:
            raise AssertionError(f"no oracle for the kernel {name}")


def positive(m: Any, x: Tensor, W: Tensor) -> Tensor:
    """The features of one vector, in R^m or R^2m."""
    if m.kernel is not None:
        return (elementwise(m.kernel, W @ x) + m.kernel_epsilon) / math.sqrt(len(W))
    signs = (1, -1) if m.features == "hyperbolic" else (1,)
    phi = torch.cat([(s * (W @ x) - x @ x / 2).exp() for s in signs])
    return phi / math.sqrt(len(phi))


def favor_plus(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    W, scale = w.projection[head], len(q[0]) ** 0.25
    if m.regularised:
        torch.testing.assert_close((W * W).sum(1), torch.full_like(W[:, 0], W.shape[1]), rtol=1e-5, atol=0)
    phi_q, phi_k = [positive(m, x / scale, W) for x in q], [positive(m, y / scale, W) for y in k]
    rows = []
    for i in range(len(q)):
        seen = visible(i, len(q), len(k), is_causal, key_mask)
        weights = [phi_q[i] @ phi_k[j] for j in seen]
        rows.append(average(weights, [v[j] for j in seen], v[0], sum(weights)))
    return torch.stack(rows)


def damped(x: Tensor, W: Tensor, damping: Tensor) -> Tensor:
    """The optimal features of one vector, in R^m."""
    A, d = -damping, len(x)
    B, D = (1 - 4 * A) ** 0.5, (1 - 4 * A) ** (d / 4)
    return torch.stack([D * (A * (r @ r) + B * (r @ x) - x @ x / 2).exp() for r in W]) / math.sqrt(len(W))


def favor_plus_plus(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Chefs' Random Tables (arXiv 2205.15317): every feature by itself, with the constants of the paper."""
    W, damping, scale = w.projection[head], w.damping[head], len(q[0]) ** 0.25
    phi_q, phi_k = [damped(x / scale, W, damping) for x in q], [damped(y / scale, W, damping) for y in k]
    rows = []
    for i in range(len(q)):
        seen = visible(i, len(q), len(k), is_causal, key_mask)
        weights = [phi_q[i] @ phi_k[j] for j in seen]
        rows.append(average(weights, [v[j] for j in seen], v[0], sum(weights)))
    return torch.stack(rows)


def damping_by_search(q: Tensor, k: Tensor) -> float:
    """The damping at which mathematics 4.8's variance is least, for the mean of |x + y|^2 over all pairs of one head.

    The variance at that mean and no other: its logarithm, up to what the damping does not touch, over a fine grid.
    """
    d = len(q[0])
    pairs = [((x + y) / d**0.25) @ ((x + y) / d**0.25) for x in q for y in k]
    p = torch.stack(pairs).mean().item()

    def log_variance(damping: float) -> float:
        a = 1 + 4 * damping
        b = 1 + 8 * damping
        return d * math.log(a) - d / 2 * math.log(b) + 2 * a / b * p

    return min((i / 20_000 for i in range(100_000)), key=log_variance)


def learned_features(
    m: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, head: int, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Hedgehog (arXiv 2402.04347): exponentials of a learned map and of its negative, here times e^(-|x|^2 / 2)."""
    scale = len(q[0]) ** 0.25

    def phi(x: Tensor, W: Tensor) -> Tensor:
        return torch.cat([(W @ x - x @ x / 2).exp(), (-(W @ x) - x @ x / 2).exp()])

    rows = []
    for i in range(len(q)):
        seen = visible(i, len(q), len(k), is_causal, key_mask)
        weights = [phi(q[i] / scale, w.query[head]) @ phi(k[j] / scale, w.key[head]) for j in seen]
        rows.append(average(weights, [v[j] for j in seen], v[0], sum(weights)))
    return torch.stack(rows)


ORACLES = {
    "Favor": favor,
    "FavorPlus": favor_plus,
    "FavorPlusPlus": favor_plus_plus,
    "LearnedFeatures": learned_features,
}
VARIANTS = [
    "Favor(features='phase')",
    "Favor(num_features=11, orthogonal=False, clamp=0.5)",
    "FavorPlus(num_features=5)",
    "LearnedFeatures(num_features=5, scale=0.5)",
    "FavorPlus(num_features=19, features='hyperbolic', orthogonal=False)",
    "FavorPlus(num_features=16, regularised=True)",
    "FavorPlusPlus(num_features=5)",
    "FavorPlusPlus(num_features=19, orthogonal=False)",
    "FavorPlus(num_features=24, kernel=Relu())",
    "FavorPlus(num_features=24, kernel=EluPlusOne(), kernel_epsilon=0.0)",
    "FavorPlus(num_features=24, kernel=Exp(), kernel_epsilon=0.1, regularised=True)",
]
