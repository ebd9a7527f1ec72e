"""Kernelised attention of every query to every key: all chunks of keys are summed, then every query reads the sums.

A chunk holds all tokens of some heads where they fit; then its operations are the only ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.recurrence import Chunk, flat, masked_rows
from fast_attention.engine.workspace import Workspace
from fast_attention.feature_maps.feature_map import InPlace
from fast_attention.mechanisms.linear import fast_linear_causal, linear_state, reference
from fast_attention.mechanisms.linear.fast_linear_causal import features, features_vjp, inside

TILE = 256  # tokens of one product among those that run side by side
FACTOR = 2  # of a causal chunk's: fewer tensors are alive here, and fewer calls share the work of two threads better

State = tuple[Tensor, Tensor]  # of phi(k) v^T (rows, C, Ev) and of phi(k) (rows, 1, C), or the gradients of these


def _chunks(x: Tensor, values: int, phi: InPlace) -> list[list[Chunk]]:
    (rows, length), width = x.shape[:2], phi.width(x.shape[-1])
    return fast_linear_causal.chunks(rows, length, TILE, max(width * values, TILE * max(width, values)), FACTOR)


class _Sums:
    """A product summed over all chunks of some rows, in float64 where there are several, and beside it a row."""

    def __init__(self, into: State, chunks: list[Chunk], workspace: Workspace) -> None:
        self.into, self.workspace = tuple(x[chunks[0].rows] for x in into), workspace
        self.totals = None if len(chunks) == 1 else [torch.zeros_like(x, dtype=torch.float64) for x in self.into]

    def add(self, a: Tensor, b: Tensor, row: Tensor, weights: Tensor | None = None) -> None:
        """``a^T b`` of tiles (tiles, size, C), (tiles, size, Ev), and ``weights row`` of (rows, tokens, C)."""
        kv, z = self.into
        if len(a) == len(kv):
            torch.bmm(a.mT, b, out=kv)
        else:
            terms = torch.bmm(a.mT, b, out=self.workspace("states", len(a), *kv.shape[1:]))
            torch.sum(terms.view(len(kv), -1, *kv.shape[1:]), 1, out=kv)
        if weights is None:
            torch.sum(row, 1, keepdim=True, out=z)
        else:
            torch.bmm(weights, row, out=z)
        if self.totals is not None:
            for total, part in zip(self.totals, self.into, strict=True):
                part.copy_(total.add_(part))


def _summarise(k: Tensor, v: Tensor, masked: Tensor | None, phi: InPlace, workspace: Workspace) -> State:
    """Sums of ``phi(k) v^T`` (rows, C, Ev) and of ``phi(k)`` (rows, 1, C)."""
    rows, width, values = len(k), phi.width(k.shape[-1]), v.shape[-1]
    state = v.new_empty((rows, width, values)), v.new_empty((rows, 1, width))
    for chunks in _chunks(k, values, phi):
        sums = _Sums(state, chunks, workspace)
        for chunk in chunks:
            keys = features(phi, k, chunk, workspace, "features", masked)
            sums.add(keys, fast_linear_causal.tokens(v, chunk, workspace, "values", masked), inside(keys, chunk))
    return state


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool, phi: InPlace, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    length, values, workspace = q.shape[-2], v.shape[-1], Workspace(v)
    kv, z = _summarise(flat(k), flat(v), masked_rows(key_mask, k), phi, workspace)
    out, denominators = v.new_empty((*q.shape[:-1], values)), v.new_empty((len(kv), length, 1))
    q, outputs, safe = flat(q), flat(out), fast_linear_causal.protected(phi, eps)
    for chunk in (chunk for chunks in _chunks(q, values, phi) for chunk in chunks):
        queries = inside(features(phi, q, chunk, workspace, "features"), chunk)
        denominator = chunk.of(denominators)
        torch.bmm(z[chunk.rows], queries.mT, out=denominator.mT)  # the vector on the left, which is the faster side
        numerator = torch.bmm(queries, kv[chunk.rows], out=workspace("product", *queries.shape[:-1], values))
        fast_linear_causal.divide(numerator, denominator, eps, chunk.of(outputs), safe=safe)
    return out, ((denominators, kv, z) if keep else ())


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, phi: InPlace, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, key_mask), (denominators, *state) = inputs, kept
    workspace, (dq, dk, dv) = Workspace(v), (x.new_empty(x.shape) for x in (q, k, v))
    quotients = flat(outputs[0]), denominators, flat(gradients[0])
    dkv, dz = _query_gradients(flat(q), quotients, (state[0], state[1]), flat(dq), phi, workspace)
    masked, k, v, d_values = masked_rows(key_mask, k), flat(k), flat(v), flat(dv)
    for chunk in (chunk for chunks in _chunks(k, v.shape[-1], phi) for chunk in chunks):
        keys = inside(features(phi, k, chunk, workspace, "features", masked), chunk)
        torch.bmm(keys, dkv[chunk.rows], out=chunk.of(d_values))
        d_keys = workspace("product", *keys.shape)
        torch.baddbmm(dz[chunk.rows], chunk.of(v), dkv[chunk.rows].mT, out=d_keys)
        features_vjp(phi, k, keys, d_keys, chunk, flat(dk), masked)
    return dq, dk, dv, None


def _query_gradients(
    q: Tensor,
    quotients: tuple[Tensor, Tensor, Tensor],
    state: State,
    dq: Tensor,
    phi: InPlace,
    workspace: Workspace,
) -> State:
    """Write ``dq``; return the gradients of the sums."""
    kv, z = state
    d_state = torch.empty_like(kv), torch.empty_like(z)
    for chunks in _chunks(q, kv.shape[-1], phi):
        sums = _Sums(d_state, chunks, workspace)
        for chunk in chunks:
            tiles = features(phi, q, chunk, workspace, "features")
            d_tiles, d_rows = fast_linear_causal.quotient_vjp(*quotients, chunk, workspace)
            queries, d_numerator, d_denominator = (inside(x, chunk) for x in (tiles, d_tiles, d_rows))
            sums.add(tiles, d_tiles, queries, d_denominator.mT)
            d_queries = torch.bmm(d_numerator, kv[chunk.rows].mT, out=workspace("product", *queries.shape))
            d_queries.addcmul_(d_denominator, z[chunk.rows])
            features_vjp(phi, q, queries, d_queries, chunk, dq)
    return d_state


def _plain(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: InPlace, eps: float) -> Tensor:
    keys = reference.masked_keys(phi.features, k, key_mask)
    return linear_state.normalise(linear_state.read(phi(q), linear_state.summarise(keys, v)), eps)


attention = CustomGradient(_plain, _forward, _backward)  # (q, k, v, key_mask, *, phi, eps) -> outputs
