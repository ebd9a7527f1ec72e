"""Kernelised attention of every query to every key in blocks: one pass over the keys, one over the queries.

A block holds all tokens of some heads where they fit; then its operations are the only ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.workspace import Workspace
from fast_attention.feature_maps.feature_map import Elementwise
from fast_attention.mechanisms.linear import fast_linear_chunks, linear_state, reference
from fast_attention.mechanisms.linear.fast_linear_chunks import Chunk, chunks_of_rows, flat, inside, masked_rows

CHUNK = 256  # tokens of one product among those that run side by side
FACTOR = 2  # of a causal block's: fewer buffers are alive here, and fewer calls share the work of two threads better

State = tuple[Tensor, Tensor]  # of phi(k) v^T (rows, C, Ev) and of phi(k) (rows, 1, C), or the gradients of these


def _numbers(width: int, values: int) -> int:
    return max(width * values, CHUNK * max(width, values))


class _Sums:
    """A product summed over all blocks of some rows, in float64 where there are several, and beside it a row."""

    def __init__(self, into: State, blocks: list[Chunk], workspace: Workspace) -> None:
        self.into, self.workspace = tuple(x[blocks[0].rows] for x in into), workspace
        self.totals = None if len(blocks) == 1 else [torch.zeros_like(x, dtype=torch.float64) for x in self.into]

    def add(self, a: Tensor, b: Tensor, row: Tensor, weights: Tensor | None = None) -> None:
        """``a^T b`` of chunks (chunks, size, C), (chunks, size, Ev), and ``weights row`` of (rows, tokens, C)."""
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


def _summarise(k: Tensor, v: Tensor, masked: Tensor | None, phi: Elementwise, workspace: Workspace) -> State:
    """Sums of ``phi(k) v^T`` (rows, C, Ev) and of ``phi(k)`` (rows, 1, C)."""
    (rows, length, width), values = k.shape, v.shape[-1]
    state = v.new_empty((rows, width, values)), v.new_empty((rows, 1, width))
    for blocks in chunks_of_rows(rows, length, CHUNK, _numbers(width, values), FACTOR):
        sums = _Sums(state, blocks, workspace)
        for chunk in blocks:
            keys = fast_linear_chunks.features(phi, k, chunk, workspace, "features", masked)
            sums.add(keys, fast_linear_chunks.tokens(v, chunk, workspace, "values", masked), inside(keys, chunk))
    return state


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool, phi: Elementwise, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (length, width), values, workspace = q.shape[-2:], v.shape[-1], Workspace(v)
    kv, z = _summarise(flat(k), flat(v), masked_rows(key_mask, k), phi, workspace)
    out, denominators = v.new_empty((*q.shape[:-1], values)), v.new_empty((len(kv), length, 1))
    queries, results, safe = flat(q), flat(out), fast_linear_chunks.protected(phi, eps)
    for blocks in chunks_of_rows(len(kv), length, CHUNK, _numbers(width, values), FACTOR):
        for chunk in blocks:
            made = inside(fast_linear_chunks.features(phi, queries, chunk, workspace, "features"), chunk)
            place = chunk.of(denominators)
            torch.bmm(z[chunk.rows], made.mT, out=place.mT)  # the vector on the left, which is the faster side
            numerator = torch.bmm(made, kv[chunk.rows], out=workspace("part", *made.shape[:-1], values))
            fast_linear_chunks.divide(numerator, place, eps, chunk.of(results), safe=safe)
    return out, ((denominators, kv, z) if keep else ())


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, phi: Elementwise, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    q, k, v, key_mask = inputs
    denominators, *state = kept
    workspace, (dq, dk, dv) = Workspace(v), (x.new_empty(x.shape) for x in (q, k, v))
    made = flat(outputs[0]), denominators, flat(gradients[0])
    dkv, dz = _query_gradients(flat(q), made, (state[0], state[1]), flat(dq), phi, workspace)
    masked, width, values = masked_rows(key_mask, k), k.shape[-1], v.shape[-1]
    k, v, into = flat(k), flat(v), flat(dv)
    for blocks in chunks_of_rows(len(k), k.shape[-2], CHUNK, _numbers(width, values), FACTOR):
        for chunk in blocks:
            keys = fast_linear_chunks.features(phi, k, chunk, workspace, "features", masked)
            torch.bmm(inside(keys, chunk), dkv[chunk.rows], out=chunk.of(into))
            part = workspace("part", *chunk.of(k).shape)
            torch.baddbmm(dz[chunk.rows], chunk.of(v), dkv[chunk.rows].mT, out=part)
            fast_linear_chunks.pull(phi, k, inside(keys, chunk), part, chunk, flat(dk), masked)
    return dq, dk, dv, None


def _query_gradients(
    q: Tensor, made: tuple[Tensor, ...], state: State, dq: Tensor, phi: Elementwise, workspace: Workspace
) -> State:  # fmt: skip
    """Fill ``dq``; the gradients of the sums."""
    (out, denominators, gradient), (kv, z), width = made, state, q.shape[-1]
    found = torch.empty_like(kv), torch.empty_like(z)
    for blocks in chunks_of_rows(len(q), q.shape[-2], CHUNK, _numbers(width, kv.shape[-1]), FACTOR):
        sums = _Sums(found, blocks, workspace)
        for chunk in blocks:
            queries = fast_linear_chunks.features(phi, q, chunk, workspace, "features")
            ups, downs = fast_linear_chunks.quotient_gradient(out, denominators, gradient, chunk, workspace)
            (row, up, down) = (inside(x, chunk) for x in (queries, ups, downs))
            sums.add(queries, ups, row, down.mT)
            part = torch.bmm(up, kv[chunk.rows].mT, out=workspace("part", *row.shape)).addcmul_(down, z[chunk.rows])
            fast_linear_chunks.pull(phi, q, row, part, chunk, dq)
    return found


def _plain(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: Elementwise, eps: float) -> Tensor:
    keys = reference.masked_keys(phi.features, k, key_mask)
    return linear_state.normalise(linear_state.read(phi(q), linear_state.summarise(keys, v)), eps)


attention = CustomGradient(_plain, _forward, _backward, fuses=True)  # (q, k, v, key_mask, *, phi, eps) -> outputs
