"""Causal kernelised attention in blocks: masked products inside chunks, prefix sums of states over them.

Sums over blocks are kept in float64. Backward, the blocks come in reverse and carry the gradient of the state; features
and states inside a block are made again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import CustomGradient
from fast_attention.engine.workspace import Workspace
from fast_attention.feature_maps.feature_map import Elementwise
from fast_attention.mechanisms.linear import fast_linear_chunks, linear_state, reference
from fast_attention.mechanisms.linear.fast_linear_chunks import Chunk, chunks_of_rows, flat, inside, masked_rows
from fast_attention.mechanisms.linear.linear_state import LinearState

TILE = 64  # tokens of a masked product


class States(NamedTuple):
    """Sums of ``phi(k) v^T`` and ``phi(k)`` beside each chunk (chunks, C, Ev) and (chunks, 1, C)."""

    kv: Tensor
    k: Tensor


class Carry(NamedTuple):
    """The same sums over all blocks so far, (rows, C, Ev) and (rows, 1, C), in float64."""

    kv: Tensor
    k: Tensor

    def add(self, kv: Tensor, k: Tensor) -> None:
        """Take in the chunks of one block."""
        rows = self.kv.shape[0]
        self.kv.add_(kv.view(rows, -1, *kv.shape[1:]).sum(1))
        self.k.add_(k.view(rows, -1, *k.shape[1:]).sum(1))


def _numbers(width: int, values: int) -> int:
    return max(width * values, TILE * max(width, values, TILE))


def _carry(kv: Tensor | None, k: Tensor | None, like: Tensor, chunk: Chunk, width: int) -> Carry:
    rows = chunk.rows.stop - chunk.rows.start
    if kv is None or k is None:
        zeros = like.new_zeros((rows, width, like.shape[-1] + 1), dtype=torch.float64)
        return Carry(zeros[..., 1:].contiguous(), zeros[..., :1].mT.contiguous())
    own = flat(kv)[chunk.rows], k.reshape(-1, 1, width)[chunk.rows]
    return Carry(*(x.to(torch.float64, copy=True) for x in own))


def _beside(first: Carry, own: States, workspace: Workspace, *, reverse: bool = False) -> States:
    """For each chunk the sum over the chunks before it (after it, if ``reverse``) and ``first``.

    Added up one after the other: no chunk takes part, not even times zero, in the sums of those that do not see it.
    """
    rows, shape = len(first.kv), own.kv.shape
    parts, places = workspace.parts("states", rows, *shape), workspace.parts("sums", rows, *shape)
    k = own.k.view(rows, -1, shape[1])
    if reverse:
        parts, places, k = parts[::-1], places[::-1], k.flip(1)
    places[0].copy_(first.kv)
    for i in range(1, len(parts)):
        torch.add(places[i - 1], parts[i - 1], out=places[i])
    k = torch.cat([first.k.to(k.dtype), k[:, :-1]], 1).cumsum(1)
    return States(workspace("sums", *shape), (k.flip(1) if reverse else k).view(own.k.shape))


def _states(keys: Tensor, v: Tensor, workspace: Workspace) -> States:
    """Each chunk's own sums."""
    kv = torch.bmm(keys.mT, v, out=workspace("states", keys.shape[0], keys.shape[-1], v.shape[-1]))
    return States(kv, torch.sum(keys, 1, keepdim=True, out=workspace("keys", keys.shape[0], 1, keys.shape[-1])))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, kv: Tensor | None, z: Tensor | None,
    *, keep: bool, phi: Elementwise, eps: float,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:  # fmt: skip
    (length, width), values = q.shape[-2:], v.shape[-1]
    masked, workspace = masked_rows(key_mask, k), Workspace(v)
    out, denominators = v.new_empty(v.shape), v.new_empty((*v.shape[:-1], 1))
    last = v.new_empty((*v.shape[:-2], width, values)), v.new_empty((*v.shape[:-2], width))
    flats = flat(q), flat(k), flat(v), flat(out), flat(denominators)
    coarse: list[Tensor] = []
    for blocks in chunks_of_rows(flats[0].shape[0], length, TILE, _numbers(width, values)):
        carry = _carry(kv, z, v, blocks[0], width)
        for chunk in blocks:
            if keep:
                coarse += [x.to(v.dtype, copy=True) for x in carry]
            _block(flats, masked, carry, chunk, workspace, phi, eps)
        flat(last[0])[blocks[0].rows] = carry.kv
        last[1].view(-1, 1, width)[blocks[0].rows] = carry.k
    return (out, *last), ((denominators, *coarse) if keep else ())


def _block(
    flats: tuple[Tensor, ...],
    masked: Tensor | None,
    carry: Carry,
    chunk: Chunk,
    workspace: Workspace,
    phi: Elementwise,
    eps: float,
) -> None:
    q, k, v, out, denominators = flats
    queries = fast_linear_chunks.features(phi, q, chunk, workspace, "queries")
    keys = fast_linear_chunks.features(phi, k, chunk, workspace, "keys' features", masked)
    v = fast_linear_chunks.tokens(v, chunk, workspace, "values", masked)
    pairs = torch.bmm(queries, keys.mT, out=workspace("pairs", len(keys), chunk.size, chunk.size)).tril_()
    denominator = torch.sum(pairs, -1, keepdim=True, out=workspace("denominator", len(keys), chunk.size, 1))
    own = _states(keys, v, workspace)
    before = _beside(carry, own, workspace)
    carry.add(*own)
    numerator = torch.bmm(pairs, v, out=workspace("numerator", *v.shape))
    torch.baddbmm(numerator, queries, before.kv, out=numerator)
    row = denominator.view(-1, 1, chunk.size)
    torch.baddbmm(row, before.k, queries.mT, out=row)
    parts = inside(numerator, chunk), chunk.of(denominators).copy_(inside(denominator, chunk))
    fast_linear_chunks.divide(*parts, eps, chunk.of(out))


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, phi: Elementwise, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    q, k, v, key_mask, kv, z = inputs
    width, denominators, coarse = q.shape[-1], kept[0], list(kept[1:])
    masked, workspace = masked_rows(key_mask, k), Workspace(v)
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    first = v.new_empty(gradients[1].shape), v.new_empty(gradients[2].shape)
    flats = *map(flat, (q, k, v, outputs[0], denominators, gradients[0])), *map(flat, grads)
    groups = list(chunks_of_rows(flats[0].shape[0], q.shape[-2], TILE, _numbers(width, v.shape[-1])))
    for blocks in reversed(groups):
        later = _carry(gradients[1], gradients[2], v, blocks[0], width)
        for chunk in reversed(blocks):
            k_before, kv_before = coarse.pop(), coarse.pop()
            _block_gradient(flats, masked, Carry(kv_before, k_before), later, chunk, workspace, phi)
        flat(first[0])[blocks[0].rows] = later.kv
        first[1].view(-1, 1, width)[blocks[0].rows] = later.k
    return *grads, None, None if kv is None else first[0], None if z is None else first[1]


def _block_gradient(
    flats: tuple[Tensor, ...],
    masked: Tensor | None,
    carry: Carry,
    later: Carry,
    chunk: Chunk,
    workspace: Workspace,
    phi: Elementwise,
) -> None:
    q, k, v, out, denominators, gradient, dq, dk, dv = flats
    queries = fast_linear_chunks.features(phi, q, chunk, workspace, "queries")
    keys = fast_linear_chunks.features(phi, k, chunk, workspace, "keys' features", masked)
    values = fast_linear_chunks.tokens(v, chunk, workspace, "values", masked)
    up, down = fast_linear_chunks.quotient_gradient(out, denominators, gradient, chunk, workspace)
    weights = workspace("weights", len(keys), chunk.size, chunk.size).copy_(down)
    torch.baddbmm(weights, up, values.mT, out=weights).tril_()
    before = _beside(carry, _states(keys, values, workspace), workspace)
    part = torch.bmm(weights, keys, out=workspace("part", *keys.shape))
    torch.baddbmm(part, up, before.kv.mT, out=part).addcmul_(down, before.k)
    pairs = torch.bmm(queries, keys.mT, out=workspace("pairs", *weights.shape)).tril_()
    own = States(
        torch.bmm(queries.mT, up, out=workspace("states", *before.kv.shape)),
        torch.bmm(down.mT, queries, out=workspace("keys", *before.k.shape)),
    )
    after = _beside(later, own, workspace, reverse=True)
    later.add(*own)
    value_part = torch.bmm(pairs.mT, up, out=workspace("value part", *up.shape))
    chunk.of(dv).copy_(inside(torch.baddbmm(value_part, keys, after.kv, out=value_part), chunk))
    key_part = torch.bmm(weights.mT, queries, out=workspace("key part", *keys.shape))
    torch.baddbmm(key_part, values, after.kv.mT, out=key_part).add_(after.k)
    fast_linear_chunks.pull(phi, q, inside(queries, chunk), inside(part, chunk), chunk, dq)
    fast_linear_chunks.pull(phi, k, inside(keys, chunk), inside(key_part, chunk), chunk, dk, masked)
    if masked is not None:
        chunk.of(dv).masked_fill_(chunk.of(masked), 0.0)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, kv: Tensor | None, z: Tensor | None,
    *, phi: Elementwise, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    state = None if kv is None or z is None else LinearState(kv, z, torch.zeros_like(z[..., :1]))
    sums, state = reference.advance(phi(q), reference.masked_keys(phi.features, k, key_mask), v, state)
    return linear_state.normalise(sums, eps), state.kv, state.k


# (q, k, v, key_mask, kv, z, *, phi, eps) -> outputs, and the sums after the last key; kv and z: those before the first
attention = CustomGradient(_plain, _forward, _backward)
