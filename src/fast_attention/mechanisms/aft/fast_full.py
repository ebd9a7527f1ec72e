"""AFT-full in tiles: ``sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)``, with its gradient.

The values of all sequences lie side by side, so that a chunk of queries is one wide product of exp(w) with exp(k) v and
exp(k). Causal chunks multiply with the keys up to their end only. There all queries share one log scale per channel,
for keys that never rise far above the first (``in_range``); others take ``reference_biased.full_causal``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.chunks import chunks_of
from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.exponential import exp_
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.mechanisms.aft import fast, reference, reference_biased

ROWS = 256  # queries per product
RANGE = 40.0  # keys may rise by this, and biases differ by this: sums stay above exp(-80), float32 ends at exp(-87)


def in_range(k: Tensor, bias: Tensor, *, any_masked: bool) -> bool:
    """Whether one log scale per channel serves every causal query, and the biases need none beside it."""
    if k.shape[-2] == 0:
        return True
    rise = (k.amax(-2) - (fast.smallest(k) if any_masked else k[..., 0, :])).amax()
    low, high = bias.detach().aminmax()
    return bool((rise <= RANGE) & (high - low <= RANGE))


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, any_masked: bool, longest: int) -> Tensor:
    both = reference.with_ones(k, v)
    if is_causal:
        sums = reference_biased.full_causal(bias, k, both, longest=longest)
    else:
        sums = reference_biased.full(bias, k, both)
    return q.sigmoid() * reference.mean(sums, v.shape[-1])


def _terms(k: Tensor, v: Tensor) -> Tensor:
    """Weighted values and weights of the keys, (S, ..., 2 D)."""
    terms = k.new_empty(k.shape[-2], *k.shape[:-2], 2 * v.shape[-1])
    fast.weigh(k, v, fast.log_scale(k), terms.movedim(0, -2))
    return terms


def _weights(bias: Tensor, at: slice, is_causal: bool, workspace: Tensor) -> Tensor:
    rows = bias[at, : at.stop] if is_causal else bias[at]
    weights = workspace[: rows.numel()].view(rows.shape)
    exp_(torch.sub(rows, rows.amax(-1, keepdim=True), out=weights))
    if is_causal:
        weights[:, at.start :].tril_()
    return weights


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, keep: bool, is_causal: bool, any_masked: bool, longest: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    terms, out = _terms(k, v), torch.empty_like(q)
    flat = terms.flatten(1)
    kept = torch.empty_like(q) if keep else None
    sums = k.new_empty(min(ROWS, q.shape[-2]), *terms.shape[1:])
    workspace = k.new_empty(len(sums) * k.shape[-2])
    for at in chunks_of(ROWS, q.shape[-2]):
        weights, rows = _weights(bias, at, is_causal, workspace), sums[: at.stop - at.start]
        torch.mm(weights, flat[: weights.shape[1]], out=rows.flatten(1))
        denominators = fast.gate(q[..., at, :], rows.movedim(0, -2), out[..., at, :], any_masked=any_masked)
        if kept is not None:
            kept[..., at, :] = denominators
    return out, () if kept is None else (kept,)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, is_causal: bool, any_masked: bool, longest: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, bias), (out,), (denominators,), (g,) = inputs, outputs, kept, gradients
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    d_bias = torch.zeros_like(bias) if bias.requires_grad else None
    terms = _terms(k, v)
    flat, d_terms = terms.flatten(1), torch.zeros_like(terms)
    sums = k.new_empty(min(ROWS, q.shape[-2]), *terms.shape[1:])
    workspace = k.new_empty(len(sums) * k.shape[-2])
    for at in chunks_of(ROWS, q.shape[-2]):
        weights, d_sums = _weights(bias, at, is_causal, workspace), sums[: at.stop - at.start]
        keys = weights.shape[1]
        tokens = (x[..., at, :] for x in (q, g, out, denominators, dq))
        fast.gate_vjp(*tokens, d_sums=d_sums.movedim(0, -2))
        d_terms.flatten(1)[:keys].addmm_(weights.mT, d_sums.flatten(1))
        if d_bias is not None:
            torch.mm(d_sums.flatten(1), flat[:keys].mT, out=d_bias[at, :keys]).mul_(weights)
    fast.weigh_vjp(v, terms.movedim(0, -2)[..., v.shape[-1] :], d_terms.movedim(0, -2), dk, dv)
    return dq, dk, dv, d_bias


_RULE = CustomGradient(_plain, _forward, _backward)


@opaque(like_queries)
def full(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, is_causal: bool, any_masked: bool, longest: int) -> Tensor:
    """AFT-full of as many queries as keys where causal; masked keys at ``scan.FLOOR``, masked values zero.

    ``longest`` as in ``reference_biased.full_causal``.
    """
    why = dispatch.obstacle(q, k, v, anywhere=True)
    if not why and is_causal and not in_range(k, bias, any_masked=any_masked):
        why = "causal, and keys or biases lie too far apart for one log scale"
    if why:
        dispatch.record("triangles of products by halving" if is_causal else "products of all pairs", why)
        return _plain(q, k, v, bias, is_causal=is_causal, any_masked=any_masked, longest=longest)
    dispatch.record("products of chunks of queries with all that they see", "every pair has a bias", rows=ROWS)
    return _RULE(q, k, v, bias, is_causal=is_causal, any_masked=any_masked, longest=longest)
