"""Attention from random features, every query to every key: all chunks of keys are summed, then queries read the sums.

Where a chunk holds a larger feature than all before it, the sums so far are rescaled to it. Arguments are flat:
q (N, L, d), k (N, S, d), v (N, S, Ev), mask (N, S) or None, and of ``Heads`` rows (N, m, d), bias (N, 1, m) or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import Tensors
from fast_attention.engine.recurrence import Chunk, groups, masked_rows
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.linear.fast_favor_chunks import RunningSums, inverse, keys_vjp
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

TOKENS = 2048  # of a chunk, of one head or of several short ones: enough for two threads to share each call
SUMMED = 4  # chunks added to a running sum before it moves into the total


def _groups(x: Tensor) -> list[list[Chunk]]:
    size = min(TOKENS, x.shape[1])
    return groups(len(x), x.shape[1], size, together=max(1, TOKENS // size))


def _chunks(x: Tensor) -> Iterator[Chunk]:
    return (chunk for chunks in _groups(x) for chunk in chunks)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *weights: Tensor | None, phi: RandomFeatureMap, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs (N, L, Ev), and for the gradient G (N, C, Ev), g and log scales (N, 1, C), 1 / denominators (N, L)."""
    heads, workspace = Heads(*cast("list[Tensor]", weights)), Workspace(q)
    state = _summarise(k, v, masked_rows(mask, k), heads.keys, phi, workspace)
    G, g, log_scale = state
    out, inv_denominator = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2])
    for chunk in _chunks(q):
        rows = chunk.rows
        values = phi.queries(chunk.of(q), heads.some(rows), log_scale[rows], workspace)
        numerator = torch.bmm(values, G[rows])
        factor = chunk.of(inv_denominator)
        factor.copy_(inverse(values.mul_(g[rows]).sum(-1)))
        torch.mul(numerator, factor[..., None], out=chunk.of(out))
    return out, (*state, inv_denominator) if keep else ()


def _summarise(
    k: Tensor, v: Tensor, masked: Tensor | None, heads: Heads, phi: RandomFeatureMap, workspace: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums G and g over all keys, and their log scales (N, 1, C)."""
    count, width = len(k), phi.width(heads.rows)
    G, g = k.new_zeros(count, width, v.shape[-1]), k.new_zeros(count, 1, width)
    log_scales = phi.first_log_scale(k, count, heads.rows)
    for chunks in _groups(k):
        rows = chunks[0].rows
        sums, log_scale = RunningSums(G[rows], g[rows], SUMMED), log_scales[rows]
        for chunk in chunks:
            hidden = None if masked is None else chunk.of(masked)
            values, half = phi.keys(chunk.of(k), heads.some(rows), hidden, workspace)
            scales = values if phi.exponential else half
            running_max = torch.maximum(log_scale, scales.amax(1, keepdim=True))
            rescale = (log_scale - running_max).exp_()
            log_scale = running_max
            phi.finish(values, half, log_scale)
            sums.rescale(rescale)
            sums.add(values, chunk.of(v))
        sums.read(G[rows], g[rows])
        log_scales[rows] = log_scale
    return G, g, log_scales


def backward(
    inputs: Tensors, outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *,
    phi: RandomFeatureMap,
) -> Tensors:  # fmt: skip
    """Gradients of q, k and v, and of trained rows and bias."""
    q, k, v, mask, *weights = cast("list[Tensor]", inputs)
    (out,), (G, g, log_scale, inv_denominator), (grad,) = outputs, kept, gradients
    workspace, heads = Workspace(q), Heads(*weights)
    d_heads = heads.mapped(torch.zeros_like) if heads.trained else None
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dG, dg = torch.zeros_like(G), torch.zeros_like(g)
    for chunk in _chunks(q):
        rows, x = chunk.rows, chunk.of(q)
        values = phi.queries(x, heads.some(rows), log_scale[rows], workspace)
        d_numerator = chunk.of(grad) * chunk.of(inv_denominator)[..., None]
        d_denominator = torch.linalg.vecdot(d_numerator, chunk.of(out)).neg_()
        d = torch.bmm(d_numerator, G[rows].mT, out=workspace("d", *values.shape))
        d.addcmul_(d_denominator[..., None], g[rows])
        dG[rows].baddbmm_(values.mT, d_numerator)
        dg[rows].baddbmm_(d_denominator[:, None], values)
        phi.vjp(d, values, x, heads.some(rows), workspace, chunk.of(dq), False, d_heads and d_heads.some(rows))
    masked = masked_rows(mask, k)
    for chunk in _chunks(k):
        rows, hidden = chunk.rows, None if masked is None else chunk.of(masked)
        keys_vjp(chunk.of(k), chunk.of(v), heads.some(rows), hidden, phi, workspace, log_scale[rows],
                 (dG[rows], dg[rows]), (chunk.of(dk), chunk.of(dv)), d_heads and d_heads.some(rows))  # fmt: skip
    return dq, dk, dv, None, *(d_heads or (None, None, None))
