"""What core peers should compute, straight from their papers, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _kernel(scores: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """``sum_j s_ij v_j / sum_j s_ij`` with the scores of a kernel in the open."""
    scores = scores.tril() if is_causal else scores
    return scores @ v / scores.sum(-1, keepdim=True)


def favor(*, is_causal: bool) -> Callable[..., Tensor]:
    """Choromanski et al. 2020 (arXiv 2009.14794), Eq. 5, with the peer's own projection matrix."""

    def truth(made: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        W = made.projection_matrix.double()

        def logs(x: Tensor) -> Tensor:
            x = x * x.shape[-1] ** -0.25
            return x @ W.mT - x.square().sum(-1, keepdim=True) / 2

        a, b = logs(q), logs(k)
        scores = torch.exp(a - a.amax(-1, keepdim=True)) @ torch.exp(b - b.amax((-2, -1), keepdim=True)).mT
        return _kernel(scores, v, is_causal)

    return truth


def efficient(*, is_causal: bool) -> Callable[..., Tensor]:
    """Shen et al. 2018 (arXiv 1812.01243): softmax(q) (softmax over tokens of k)^T v; causal: exp(k), normalised."""

    def truth(made: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not is_causal:
            return (q.softmax(-1) * q.shape[-1] ** -0.5) @ (k.softmax(-2).mT @ v)
        return _kernel(q.softmax(-1) @ k.exp().mT, v, True)

    return truth


def zero_values(made: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Any attention is linear in its values: its answer to v, by what it says to 2 v and to v: f(2 v) - f(v) = f(v)."""
    with torch.no_grad():
        q, k, v = (x.float() for x in (q, k, v))
        return (made(q.clone(), k.clone(), 2 * v) - made(q.clone(), k.clone(), v.clone())).double()
