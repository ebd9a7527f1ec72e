"""Causal kernelised attention: masked products inside tiles, prefix sums of states over them, chunks that carry sums.

Sums over chunks are kept in float64. Features and the states of tiles are computed again for the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.recurrence import Chunk, ChunkPass, flat, masked_rows
from fast_attention.engine.workspace import Workspace
from fast_attention.feature_maps.feature_map import InPlace
from fast_attention.mechanisms.linear import fast_linear_chunks, reference
from fast_attention.mechanisms.linear.fast_linear_chunks import chunks, features, features_vjp, inside
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise

TILE = 64  # tokens of a masked product


class States(NamedTuple):
    """Sums of ``phi(k) v^T`` and ``phi(k)``: (tiles, C, Ev) and (tiles, 1, C), or (rows, ...) in float64 as a carry."""

    kv: Tensor
    k: Tensor

    def add(self, kv: Tensor, k: Tensor) -> None:
        """Add the tiles of one chunk to this carry."""
        rows = self.kv.shape[0]
        self.kv.add_(kv.view(rows, -1, *kv.shape[1:]).sum(1))
        self.k.add_(k.view(rows, -1, *k.shape[1:]).sum(1))


def _chunks(q: Tensor, v: Tensor, phi: InPlace) -> list[list[Chunk]]:
    (rows, length), width, values = q.shape[:2], phi.width(q.shape[-1]), v.shape[-1]
    return chunks(rows, length, TILE, max(width * values, TILE * max(width, values, TILE)))


def _beside(first: Sequence[Tensor], tiles: States, workspace: Workspace, *, reverse: bool = False) -> States:
    """For each tile the sum over the tiles before it (after it, if ``reverse``) and ``first``.

    Added up one after the other: no tile takes part, not even times zero, in the sums of those that do not see it.
    """
    (first_kv, first_k), shape = first, tiles.kv.shape
    rows = len(first_kv)
    terms, sums = workspace.parts("states", rows, *shape), workspace.parts("sums", rows, *shape)
    k = tiles.k.view(rows, -1, shape[1])
    if reverse:
        terms, sums, k = terms[::-1], sums[::-1], k.flip(1)
    sums[0].copy_(first_kv)
    for i in range(1, len(terms)):
        torch.add(sums[i - 1], terms[i - 1], out=sums[i])
    k = torch.cat([first_k.to(k.dtype), k[:, :-1]], 1).cumsum(1)
    return States(workspace("sums", *shape), (k.flip(1) if reverse else k).view(tiles.k.shape))


def _states(keys: Tensor, v: Tensor, workspace: Workspace) -> States:
    """The sums of each tile."""
    kv = torch.bmm(keys.mT, v, out=workspace("states", keys.shape[0], keys.shape[-1], v.shape[-1]))
    return States(kv, torch.sum(keys, 1, keepdim=True, out=workspace("keys", keys.shape[0], 1, keys.shape[-1])))


@dataclass(frozen=True)
class _Pass(ChunkPass[States]):
    q: Tensor
    k: Tensor
    v: Tensor
    masked: Tensor | None
    phi: InPlace
    workspace: Workspace
    first: tuple[Tensor | None, Tensor | None]  # carried in, (..., C, Ev) and (..., C)
    last: tuple[Tensor, Tensor]  # carried out

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.phi.width(self.q.shape[-1])

    def begin(self, rows: slice) -> States:
        width, (kv, k) = self.width, self.first
        if kv is None or k is None:
            zeros = self.v.new_zeros((rows.stop - rows.start, width, self.v.shape[-1] + 1), dtype=torch.float64)
            return States(zeros[..., 1:].contiguous(), zeros[..., :1].mT.contiguous())
        carried = flat(kv)[rows], k.reshape(-1, 1, width)[rows]
        return States(*(x.to(torch.float64, copy=True) for x in carried))

    def end(self, rows: slice, carry: States) -> None:
        flat(self.last[0])[rows] = carry.kv
        self.last[1].view(-1, 1, self.width)[rows] = carry.k

    def read(self, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries and keys, and values, in tiles."""
        queries = features(self.phi, self.q, chunk, self.workspace, "queries")
        keys = features(self.phi, self.k, chunk, self.workspace, "keys' features", self.masked)
        return queries, keys, fast_linear_chunks.tokens(self.v, chunk, self.workspace, "values", self.masked)


@dataclass(frozen=True)
class _Forward(_Pass):
    out: Tensor
    denominators: Tensor
    eps: float

    def chunk(self, chunk: Chunk, carry: States, kept: Sequence[Tensor]) -> None:
        for before, x in zip(kept, carry, strict=False):
            before.copy_(x)
        workspace, (queries, keys, v) = self.workspace, self.read(chunk)
        pairs = torch.bmm(queries, keys.mT, out=workspace("pairs", len(keys), chunk.size, chunk.size)).tril_()
        denominator = torch.sum(pairs, -1, keepdim=True, out=workspace("denominator", len(keys), chunk.size, 1))
        tiles = _states(keys, v, workspace)
        before = _beside(carry, tiles, workspace)
        carry.add(*tiles)
        numerator = torch.bmm(pairs, v, out=workspace("numerator", *v.shape))
        torch.baddbmm(numerator, queries, before.kv, out=numerator)
        row = denominator.view(-1, 1, chunk.size)
        torch.baddbmm(row, before.k, queries.mT, out=row)
        divisor = chunk.of(self.denominators).copy_(inside(denominator, chunk))
        fast_linear_chunks.divide(inside(numerator, chunk), divisor, self.eps, chunk.of(self.out))


@dataclass(frozen=True)
class _Backward(_Pass):
    out: Tensor
    denominators: Tensor
    grad_out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def chunk(self, chunk: Chunk, carry: States, kept: Sequence[Tensor]) -> None:
        workspace, (queries, keys, values) = self.workspace, self.read(chunk)
        d_numerator, d_denominator = fast_linear_chunks.quotient_vjp(
            self.out, self.denominators, self.grad_out, chunk, workspace
        )
        d_pairs = workspace("d_pairs", len(keys), chunk.size, chunk.size).copy_(d_denominator)
        torch.baddbmm(d_pairs, d_numerator, values.mT, out=d_pairs).tril_()
        before = _beside(kept, _states(keys, values, workspace), workspace)
        d_queries = torch.bmm(d_pairs, keys, out=workspace("d_queries", *keys.shape))
        torch.baddbmm(d_queries, d_numerator, before.kv.mT, out=d_queries).addcmul_(d_denominator, before.k)
        pairs = torch.bmm(queries, keys.mT, out=workspace("pairs", *d_pairs.shape)).tril_()
        tiles = States(
            torch.bmm(queries.mT, d_numerator, out=workspace("states", *before.kv.shape)),
            torch.bmm(d_denominator.mT, queries, out=workspace("keys", *before.k.shape)),
        )
        after = _beside(carry, tiles, workspace, reverse=True)
        carry.add(*tiles)
        d_values = torch.bmm(pairs.mT, d_numerator, out=workspace("d_values", *d_numerator.shape))
        chunk.of(self.dv).copy_(inside(torch.baddbmm(d_values, keys, after.kv, out=d_values), chunk))
        d_keys = torch.bmm(d_pairs.mT, queries, out=workspace("d_keys", *keys.shape))
        torch.baddbmm(d_keys, values, after.kv.mT, out=d_keys).add_(after.k)
        features_vjp(self.phi, self.q, inside(queries, chunk), inside(d_queries, chunk), chunk, self.dq)
        features_vjp(self.phi, self.k, inside(keys, chunk), inside(d_keys, chunk), chunk, self.dk, self.masked)
        if self.masked is not None:
            chunk.of(self.dv).masked_fill_(chunk.of(self.masked), 0.0)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, kv: Tensor | None, z: Tensor | None,
    *, keep: bool, phi: InPlace, eps: float,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:  # fmt: skip
    width, values, order = phi.width(q.shape[-1]), v.shape[-1], _chunks(flat(q), v, phi)
    out, denominators = v.new_empty(v.shape), v.new_empty((*v.shape[:-1], 1))
    last = v.new_empty((*v.shape[:-2], width, values)), v.new_empty((*v.shape[:-2], width))
    count = order[-1][0].rows.stop, len(order[0])
    kept = (v.new_empty(*count, width, values), v.new_empty(*count, 1, width)) if keep else ()
    tensors = flat(q), flat(k), flat(v), masked_rows(key_mask, k), phi, Workspace(v), (kv, z), last
    _Forward(*tensors, flat(out), flat(denominators), eps).run(order, kept)
    return (out, *last), ((denominators, *kept) if keep else ())


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, phi: InPlace, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, key_mask, kv, z), (denominators, *before), (grad_out, *d_last) = inputs, kept, gradients
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    d_first = v.new_empty(d_last[0].shape), v.new_empty(d_last[1].shape)
    tensors = flat(q), flat(k), flat(v), masked_rows(key_mask, k), phi, Workspace(v), (d_last[0], d_last[1]), d_first
    vjp = _Backward(*tensors, *map(flat, (outputs[0], denominators, grad_out, *grads)))
    vjp.run(_chunks(flat(q), v, phi), before, backward=True)
    return *grads, None, None if kv is None else d_first[0], None if z is None else d_first[1]


def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, kv: Tensor | None, z: Tensor | None,
    *, phi: InPlace, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    state = None if kv is None or z is None else LinearState(kv, z, torch.zeros_like(z[..., :1]))
    sums, state = reference.advance(phi(q), reference.masked_keys(phi.features, k, key_mask), v, state)
    return normalise(sums, eps), state.kv, state.k


# (q, k, v, key_mask, kv, z, *, phi, eps) -> outputs, and the sums after the last key; kv and z: those before the first
attention = CustomGradient(_plain, _forward, _backward)
