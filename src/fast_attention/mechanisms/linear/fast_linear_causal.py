"""Causal kernelised attention: masked products inside tiles, prefix sums of states over them, chunks that carry sums.

Sums over chunks are kept in float64. Features and the states of tiles are computed again for the gradient.

Linear attention's chunks in memory that is used again and again: features, divisions and their gradients, in place.

A chunk of some heads is several tiles of one size side by side, (tiles, size, E), so that few calls do much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.numerics import nan_if_infinite
from fast_attention.engine.recurrence import Chunk, ChunkPass, flat, groups, masked_rows
from fast_attention.engine.workspace import Workspace
from fast_attention.feature_maps.feature_map import FeatureMap, InPlace
from fast_attention.feature_maps.features import EluPlusOne, Relu, SoftmaxMap
from fast_attention.mechanisms.linear import reference
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise

NUMBERS = 2**18  # in one tensor of a chunk: a megabyte in float32, half of it a core's
NEVER_NEGATIVE = (EluPlusOne, Relu, SoftmaxMap)


def chunks(rows: int, length: int, size: int, numbers: int, factor: int = 1) -> list[list[Chunk]]:
    """Groups of chunks of as many tiles as ``factor`` times ``NUMBERS`` holds, where a tile takes ``numbers``."""
    size = min(size, length)
    tiles = max(1, factor * NUMBERS // numbers)
    return groups(rows, length, tiles * size, together=max(1, tiles // -(-length // size)), tile=size)


def tokens(x: Tensor, chunk: Chunk, workspace: Workspace, name: str, masked: Tensor | None = None) -> Tensor:
    """The chunk's tiles (tiles, size, E), zeros where masked or padding: a view where that is possible, else a copy."""
    block = chunk.of(x)
    if chunk.full and masked is None and block.is_contiguous():
        return block.view(-1, chunk.size, x.shape[-1])
    tiles, filled = _memory(block, chunk, workspace, name, x.shape[-1])
    filled.copy_(block)
    if masked is not None:
        filled.masked_fill_(chunk.of(masked), 0.0)
    return tiles


def features(
    phi: InPlace, x: Tensor, chunk: Chunk, workspace: Workspace, name: str, masked: Tensor | None = None
) -> Tensor:
    """``phi`` of the chunk's tokens, (tiles, size, C), zeros for masked keys and padding."""
    block = chunk.of(x)
    tiles, filled = _memory(block, chunk, workspace, name, phi.width(x.shape[-1]))
    phi.at(chunk.span.start).fill(block, filled, workspace("scratch", *block.shape))
    if masked is not None:
        filled.masked_fill_(chunk.of(masked), 0.0)
    return tiles


def _memory(block: Tensor, chunk: Chunk, workspace: Workspace, name: str, width: int) -> tuple[Tensor, Tensor]:
    """Tiles, zeros in the padding, and the part of them that is to be filled."""
    count, length = block.shape[0], block.shape[1]
    padded = workspace(name, count, chunk.size * chunk.tiles, width)
    filled = padded
    if not chunk.full:
        filled = padded[:, :length]
        padded[:, length:].zero_()
    return padded.view(-1, chunk.size, width), filled


def inside(x: Tensor, chunk: Chunk) -> Tensor:
    """Tiles (tiles, size, E) as the chunk's tokens (rows, tokens, E), without padding."""
    x = x.view(-1, chunk.size * chunk.tiles, x.shape[-1])
    return x if chunk.full else x[:, : chunk.span.stop - chunk.span.start]


def features_vjp(
    phi: InPlace, x: Tensor, values: Tensor, gradient: Tensor, chunk: Chunk, out: Tensor,
    masked: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient of the chunk's ``x`` from that of ``values = phi(x)``, which are lost."""
    dx = chunk.of(out)
    phi.at(chunk.span.start).vjp(chunk.of(x), values, gradient, dx)
    if masked is not None:
        dx.masked_fill_(chunk.of(masked), 0.0)


def protected(phi: FeatureMap, eps: float) -> bool:
    """Whether no denominator can be as good as zero: features are never negative, and ``eps`` is large enough."""
    return eps >= 1e-30 and isinstance(phi, NEVER_NEGATIVE)


def divide(numerator: Tensor, denominator: Tensor, eps: float, out: Tensor, *, safe: bool = False) -> None:
    """``numerator / (denominator + eps)`` into ``out``, zeros where that is as good as zero; ``safe``: it never is.

    ``denominator`` becomes what was divided by: infinity where the result is zero.
    """
    denominator.copy_(nan_if_infinite(denominator.add_(eps) if eps else denominator))
    if not safe:
        info = torch.finfo(denominator.dtype)
        denominator.masked_fill_(denominator.abs() < info.tiny / info.eps, float("inf"))
    torch.div(numerator, denominator, out=out)


def quotient_vjp(
    out: Tensor, denominators: Tensor, grad_out: Tensor, chunk: Chunk, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Gradients of the chunk's numerators (tiles, size, Ev) and denominators (tiles, size, 1), zeros in padding."""
    block = chunk.of(grad_out)
    d_numerator, filled = _memory(block, chunk, workspace, "d_numerator", block.shape[-1])
    d_denominator, filled_row = _memory(block, chunk, workspace, "d_denominator", 1)
    torch.div(block, chunk.of(denominators), out=filled)
    terms = torch.mul(filled, chunk.of(out), out=workspace("scratch of values", *block.shape))
    filled_row.copy_(terms.sum(-1, keepdim=True)).neg_()
    return d_numerator, d_denominator


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
        return queries, keys, tokens(self.v, chunk, self.workspace, "values", self.masked)


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
        divide(inside(numerator, chunk), divisor, self.eps, chunk.of(self.out))


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
        d_numerator, d_denominator = quotient_vjp(self.out, self.denominators, self.grad_out, chunk, workspace)
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
