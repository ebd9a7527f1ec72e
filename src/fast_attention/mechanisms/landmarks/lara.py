"""LARA (Zheng, Wang and Kong 2022): softmax by importance sampling, from one draw around each of a few landmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch, masks
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.random_features import draw
from fast_attention.mechanism import Attention, Shape, Traits
from fast_attention.mechanisms.landmarks.means import segment_means
from fast_attention.value import at_least

SMALLEST = 1e-8  # of the shares of proposals


class Noise(NamedTuple):
    """What is added to every landmark, N(0, I): of each head its own."""

    noise: Float[Tensor, "heads landmarks width"]


@in_float32
def lara_attention(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads length width"],
    v: Float[Tensor, "*batch heads length values"],
    noise: Float[Tensor, "heads landmarks width"],
    *,
    query_weight: float = 0.0,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """Self-normalised importance sampling of softmax attention with several proposals (arXiv 2204.04667).

    With x = d^(-1/4) times queries and keys and ``xi(x, w) = exp(w . x - |x|^2 / 2)``, softmax attention is the mean of
    ``f(w) = sum_m xi(k_m, w) v_m / sum_m xi(k_m, w)`` over ``p_n(w)``, which is as ``N(w; 0, I) xi(q_n, w) sum_m
    xi(k_m, w)``. One w_c is drawn from each proposal ``N(mu_c, I)``, where mu_c is the mean query plus the mean key of
    segment c, and weighed by ``p_n(w_c) / sum_c' N(w_c; mu_c', I)``, the balance heuristic:

        out_n = softmax_c(w_c . q_n + b_c) f(w_c),
        b_c = log sum_m xi(k_m, w_c) - log sum_c' exp(w_c . mu_c' - |mu_c'|^2 / 2)

    With ``query_weight`` b the share of c in the balance heuristic, ``alpha_c = N(w_c; mu_c, I) / sum_c' N(w_c; mu_c',
    I)``, becomes ``alpha_nc = max(alpha_c + b (t_nc - mean_c t_nc), 1e-8)``, where ``t_nc`` is the softmax over the
    queries n of ``q_n . qbar_c``, qbar_c being the mean query of segment c. Time O(n c d), memory O(n c).
    """
    dispatch.record("products with one draw for each landmark", "as many at any length", landmarks=noise.shape[-2])
    q, k = (x * q.shape[-1] ** -0.25 for x in (q, k))
    (queries, keys), count = segment_means(q, k, number=noise.shape[-2], key_mask=key_mask)
    centres = queries + keys
    draws = centres + noise.to(q.dtype)
    proposed = None if count is None else (count > 0)[..., None, :]
    visible = None if key_mask is None else key_mask[..., None, :]
    scores, proposals = _log_xi(draws, k), _log_xi(draws, centres)
    values = masks.masked_softmax(scores, visible) @ masks.drop(v, key_mask)
    proposal, log_alpha = _log_sum(proposals, proposed), 0.0
    if query_weight != 0.0:
        density = proposals.diagonal(dim1=-2, dim2=-1)
        alpha = (density - proposal).exp()[..., None, :] + query_weight * _preferences(q, queries, key_mask, count)
        proposal, log_alpha = density, alpha.clamp(min=SMALLEST).log()
    log_weights = (_log_sum(scores, visible) - proposal)[..., None, :] + log_alpha
    return masks.masked_softmax(q @ draws.mT + log_weights, proposed) @ values


def _preferences(
    q: Tensor, mean_queries: Tensor, key_mask: Tensor | None, count: Tensor | None
) -> Float[Tensor, "*batch length landmarks"]:
    """``t_nc`` less its mean over landmarks: how much of landmark c's weight over visible queries is query n's."""
    logits = q @ mean_queries.mT
    visible = logits if key_mask is None else logits.masked_fill(~key_mask[..., None], torch.finfo(logits.dtype).min)
    t = (logits - visible.logsumexp(-2, keepdim=True)).clamp(max=0.0).exp()
    if count is None:
        return t - t.mean(-1, keepdim=True)
    proposed = (count > 0)[..., None, :]
    t = t.masked_fill(~proposed, 0.0)
    return t - t.sum(-1, keepdim=True) / proposed.sum(-1, keepdim=True).clamp(min=1)


def _log_xi(w: Tensor, x: Tensor) -> Float[Tensor, "*batch draws n"]:
    return w @ x.mT - 0.5 * x.square().sum(-1)[..., None, :]


def _log_sum(logs: Tensor, visible: Tensor | None) -> Float[Tensor, "*batch draws"]:
    """The logarithm of the sum over what is visible; some large negative number where nothing is."""
    logs = logs if visible is None else logs.masked_fill(~visible, torch.finfo(logs.dtype).min)
    return logs.logsumexp(-1)


@dataclass(frozen=True, repr=False)
class LARA(Attention[Noise, tuple[()]]):
    """Softmax estimated from random features drawn around landmarks, means of neighbouring queries and keys.

    Where ``FavorPlus`` draws its projections around zero, these are drawn where the data is. Every landmark depends on
    later tokens, so that it cannot be causal; and it is for self-attention, since a ``key_mask`` says of queries too
    which are padding and belong to no landmark. Proposals stand at means, and nothing is trained: of the authors' code
    (HKUNLP/efficient-attention) this is ``mis-bh``, and ``mis-opt``, their default, with ``query_weight=1.0``. Their
    proposals also go through a trained layer, drawn anew in every training step, and without noise in evaluation.

    Args:
        num_landmarks: Segments of neighbouring tokens, each with one proposal and one draw.
        query_weight: How much a query prefers the proposals whose queries are like it, as a coefficient; 0: all queries
            weigh proposals by the balance heuristic alone.
    """

    num_landmarks: int = 64
    query_weight: float = 0.0

    traits = Traits(
        paper="Zheng et al. 2022, arXiv 2204.04667",
        formula="softmax_c(w_c . q + b_c) sum_m xi(k_m, w_c) v_m / sum_m xi(k_m, w_c), w_c drawn around landmark c",
        cost="n r d",
        order=1.0,
        padding=True,
        rotary=True,
        random=True,
        approximates="Softmax",
    )

    def __post_init__(self) -> None:
        at_least(self, "num_landmarks", self.num_landmarks, 1)
        at_least(self, "query_weight", self.query_weight, 0.0)

    def weights(self, shape: Shape) -> Noise:
        """Noise for every head and landmark, orthogonal within blocks of the heads' width."""
        return Noise(draw(shape.heads, self.num_landmarks, shape.head_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Noise, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """``lara_attention`` with these draws."""
        return lara_attention(q, k, v, w.noise, query_weight=self.query_weight, key_mask=key_mask)
