"""Attention from random features without a causal order: two loops over blocks, a unit for each feature of the keys.

Where a block holds a larger feature than all before it, the sums so far are brought into its unit. Arguments are flat:
q (N, L, d), k (N, S, d), v (N, S, Ev), mask (N, S) or None, and of ``Heads`` rows (N, m, d), bias (N, 1, m) or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

BLOCK = 2048  # tokens, of one head or of several short ones: enough for two threads to share each call
SUMMED = 4  # block sums added to a running sum before it moves into the total


def _blocks(count: int, length: int) -> Iterator[tuple[slice, list[slice]]]:
    """Groups of heads, each with its blocks of tokens."""
    size = min(BLOCK, length)
    several = max(1, BLOCK // size)
    for head in range(0, count, several):
        yield slice(head, min(head + several, count)), [slice(at, at + size) for at in range(0, length, size)]


def inverse(denominator: Tensor) -> Tensor:
    """One over it, in place; 0 where it is too small for a quotient to mean much, as in ``linear_state.normalise``."""
    info = torch.finfo(denominator.dtype)
    nothing = denominator.abs() < info.tiny / info.eps
    return denominator.reciprocal_().masked_fill_(nothing, 0.0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *of_heads: Any, phi: RandomFeatureMap, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs (N, L, Ev), and for the way back G (N, C, Ev), g and the units (N, 1, C), 1 / denominators (N, L)."""
    heads = Heads(*of_heads)
    workspace, count, width = Workspace(q), len(q), phi.width(heads.rows)
    G, g = q.new_zeros(count, width, v.shape[-1]), q.new_zeros(count, 1, width)
    unit = phi.units(q, heads.rows)
    for some, blocks in _blocks(count, k.shape[1]):
        unit[some] = _gather(k[some], v[some], heads.keys.some(some), None if mask is None else mask[some], phi,
                             workspace, blocks, G[some], g[some])  # fmt: skip
    out, over = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2])
    for some, blocks in _blocks(count, q.shape[1]):
        for at in blocks:
            values = phi.queries(q[some, at], heads.some(some), unit[some], workspace, "queries")
            found = torch.bmm(values, G[some])
            scale = over[some, at]
            scale.copy_(inverse(values.mul_(g[some]).sum(-1)))
            torch.mul(found, scale[..., None], out=out[some, at])
    return out, (G, g, unit, over) if keep else ()


def _gather(
    k: Tensor, v: Tensor, heads: Heads, mask: Tensor | None, phi: RandomFeatureMap, workspace: Workspace,
    blocks: list[slice], G: Tensor, g: Tensor,
) -> Tensor:  # fmt: skip
    """Add the keys' sums to G and g, and return their units (h, 1, C)."""
    unit = phi.units(k, heads.rows)
    part, few = torch.zeros_like(G), torch.zeros_like(g)
    for index, at in enumerate(blocks):
        values, half = phi.keys(k[:, at], heads, None if mask is None else mask[:, at], workspace, "keys")
        higher = torch.maximum(unit, phi.scales(values, half).amax(1, keepdim=True))
        rescale = (unit - higher).exp_()
        unit = higher
        phi.finish(values, half, unit)
        for total, factor in ((G, rescale.mT), (g, rescale), (part, rescale.mT), (few, rescale)):
            total.mul_(factor)
        part.baddbmm_(values.mT, v[:, at])
        few.add_(values.sum(1, keepdim=True))
        if index % SUMMED == SUMMED - 1 or index == len(blocks) - 1:
            G.add_(part)
            g.add_(few)
            part.zero_()
            few.zero_()
    return unit


def backward(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...], *, phi: RandomFeatureMap,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k and v, and of trained rows and bias."""
    q, k, v, mask, *of_heads = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    (out,), (G, g, unit, over), (grad,) = outputs, kept, gradients
    workspace, heads = Workspace(q), Heads(*cast("list[Tensor]", of_heads))
    learned = heads.mapped(torch.zeros_like) if heads.trained else None
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dG, dg = torch.zeros_like(G), torch.zeros_like(g)
    for some, blocks in _blocks(len(q), q.shape[1]):
        for at in blocks:
            own = heads.some(some)
            values = phi.queries(q[some, at], own, unit[some], workspace, "queries")
            dn = grad[some, at] * over[some, at, None]
            dd = torch.linalg.vecdot(dn, out[some, at]).neg_()
            d = torch.bmm(dn, G[some].mT, out=workspace("d", *values.shape)).addcmul_(dd[..., None], g[some])
            dG[some].baddbmm_(values.mT, dn)
            dg[some].baddbmm_(dd[:, None], values)
            phi.pull(d, values, q[some, at], own, workspace, dq[some, at], False, learned and learned.some(some))
    for some, blocks in _blocks(len(k), k.shape[1]):
        for at in blocks:
            scatter(k[some, at], v[some, at], heads.some(some), None if mask is None else mask[some, at], phi,
                    workspace, unit[some], (dG[some], dg[some]), (dk[some, at], dv[some, at]),
                    learned and learned.some(some))  # fmt: skip
    return dq, dk, dv, None, *(learned or (None, None, None))


def scatter(
    k: Tensor, v: Tensor, heads: Heads, mask: Tensor | None, phi: RandomFeatureMap, workspace: Workspace, unit: Tensor,
    sums: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], learned: Heads | None,
) -> None:  # fmt: skip
    """Gradients of a block of keys and values, from those of G and g in units ``e^-unit``."""
    (dG, dg), (dk, dv), heads = sums, out, heads.keys
    values, half = phi.keys(k, heads, mask, workspace, "keys")
    phi.finish(values, half, unit)
    d = torch.bmm(v, dG.mT, out=workspace("d", *values.shape)).add_(dg)
    dv.copy_(torch.bmm(values, dG, out=workspace("dv", *v.shape)))
    phi.pull(d, values, k, heads, workspace, dk, True, learned and learned.keys)
    if mask is not None:
        dk.masked_fill_(~mask[..., None], 0.0)
