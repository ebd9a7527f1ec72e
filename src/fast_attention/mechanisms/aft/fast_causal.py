"""Causal AFT-simple in chunks: ``sigmoid(q_i) * sum_{j <= i} exp(k_j) v_j / sum_{j <= i} exp(k_j)``, with its gradient.

A chunk has one log scale, the running maximum at its end, as long as no query of it has seen only keys far below that:
then every denominator is an ordinary number, and plain sums are exact. Any other chunk takes a log scale per token
(``reference.running``). One row of sums, in float64, is carried from chunk to chunk.

Inside a chunk tokens lie in groups of ``GROUP``: row t of all groups is contiguous, and prefix sums are ``GROUP`` - 1
additions of such rows, then the same over the groups' ends by one cumulative sum.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine import trace
from fast_attention.engine.numerics import exp_
from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.scan import FLOOR
from fast_attention.mechanisms.aft import fast, gpu, reference
from fast_attention.mechanisms.aft.reference import Pool

GROUP = 16


class Chunk(NamedTuple):
    """Tokens, whether one log scale serves them, and the size of the groups in which they are summed."""

    at: slice
    one_scale: bool
    group: int


def chunks(k: Tensor, *, any_masked: bool) -> tuple[list[Chunk], Tensor]:
    """The chunks, and the log scale at the end of each, (..., 1 + chunks, D), the first one ``FLOOR / 2``."""
    length = k.shape[-2]
    size, grouped = fast.chunk_length(k, GROUP), length // GROUP * GROUP
    ends = sorted({*range(0, grouped, size), grouped, length})
    keys = [k[..., a:b, :] for a, b in itertools.pairwise(ends)]
    low = torch.stack([fast.smallest(x) if any_masked else x[..., 0, :] for x in keys], -2)
    scales = torch.stack([k.new_full(low[..., 0, :].shape, FLOOR / 2), *(x.amax(-2) for x in keys)], -2)
    scales = scales.cummax(-2).values
    rise = scales[..., 1:, :] - torch.maximum(scales[..., :-1, :], low)
    one_scale = (rise <= fast.RANGE).movedim(-2, 0).flatten(1).all(-1).tolist()
    return [
        Chunk(slice(a, b), fits, GROUP if b - a >= GROUP else b - a)
        for (a, b), fits in zip(itertools.pairwise(ends), one_scale, strict=True)
    ], scales


class GroupedSums:
    """A buffer (group, ..., groups, width), and the same memory in the order of the tokens."""

    def __init__(self, like: Tensor, chunk: Chunk, width: int) -> None:
        count = (chunk.at.stop - chunk.at.start) // chunk.group
        self.rows = like.new_empty(chunk.group, *like.shape[:-2], count, width)
        self.tokens = self.rows.movedim(0, -2)  # (..., groups, group, width)

    def accumulate_(self, carry: Tensor, *, backwards: bool = False) -> Tensor:
        """Every token becomes the sum of all up to it (or from it) and of ``carry``; the last sum, in float64."""
        rows = self.rows.unbind(0)
        rows = rows[::-1] if backwards else rows
        for one, two in itertools.pairwise(rows):
            two.add_(one)
        total = carry + rows[-1].sum(-2, keepdim=True)  # float64 never rounds to the rows' precision on its way
        carry = carry.to(self.rows.dtype)
        if self.rows.shape[-2] > 1:
            ends = rows[-1].flip(-2) if backwards else rows[-1]
            ends = torch.cat([carry, ends[..., :-1, :]], -2)
            ends = ends.mT.contiguous().cumsum(-1).mT  # fast along the last axis only
            carry = ends.flip(-2) if backwards else ends
        self.rows.add_(carry)
        return total


def _plain(q: Tensor, k: Tensor, v: Tensor, *, any_masked: bool) -> Tensor:
    return reference.gated_running_means(q, k, v)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, keep: bool, any_masked: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    cuts, scales = chunks(k, any_masked=any_masked)
    out, width = torch.empty_like(q), v.shape[-1]
    carry, carries = k.new_zeros(*k.shape[:-2], 1, 2 * width, dtype=torch.float64), []
    for i, chunk in enumerate(cuts):
        carries.append(carry)
        before, scale = scales[..., i : i + 1, :], scales[..., i + 1 : i + 2, :]
        tokens = [x[..., chunk.at, :] for x in (q, k, v)]
        if not chunk.one_scale:
            out[..., chunk.at, :], carry = _token_by_token(*tokens, carry=carry.to(k.dtype), scale=before)
            continue
        queries, keys, values, rows = (x.unflatten(-2, (-1, chunk.group)) for x in (*tokens, out[..., chunk.at, :]))
        sums = GroupedSums(k, chunk, 2 * width)
        fast.weigh(keys, values, scale[..., None, :], sums.tokens)
        carry = sums.accumulate_(carry * _decay(before, scale))
        fast.gate(queries, sums.tokens, rows, any_masked=any_masked)
    return out, (scales, torch.cat(carries, -2)) if keep else ()


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, any_masked: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors, (scales, carries) = (*inputs, *gradients, *outputs), saved
    d_inputs = [torch.empty_like(x) for x in inputs]
    d_carry = torch.zeros_like(carries[..., :1, :])  # the gradient of the sums at the end of the chunk
    for i, chunk in reversed(list(enumerate(chunks(inputs[1], any_masked=any_masked)[0]))):
        before, scale, carry = scales[..., i : i + 1, :], scales[..., i + 1 : i + 2, :], carries[..., i : i + 1, :]
        tokens = [x[..., chunk.at, :] for x in (*tensors, *d_inputs)]
        if chunk.one_scale:
            decay = _decay(before, scale)
            tokens = [x.unflatten(-2, (-1, chunk.group)) for x in tokens]
            d_carry = _chunk_vjp(tokens, chunk, carry * decay, d_carry, scale, any_masked=any_masked) * decay
        else:
            *rows, d_carry = _token_by_token_vjp(tokens[:4], carry, before, d_carry)
            for x, row in zip(tokens[5:], rows, strict=True):
                x.copy_(row)
    return tuple(d_inputs)


def _decay(before: Tensor, scale: Tensor) -> Tensor:
    """Factor that brings numerators and denominators from one log scale to a later one."""
    return torch.cat([(before - scale).exp()] * 2, -1)


def _chunk_vjp(
    tokens: list[Tensor], chunk: Chunk, carry: Tensor, d_carry: Tensor, scale: Tensor, *, any_masked: bool
) -> Tensor:
    """Fill the gradients of one chunk with one log scale; returns the gradient of the sums in front of it."""
    q, k, v, g, out, dq, dk, dv = tokens
    width = v.shape[-1]
    denominators, d_sums = GroupedSums(scale, chunk, width), GroupedSums(scale, chunk, 2 * width)
    exp_(torch.sub(k, scale[..., None, :], out=dv))
    denominators.tokens.copy_(dv)
    denominators.accumulate_(carry[..., width:])
    fast.gate_vjp(q, g, out, fast.safe(denominators.tokens, any_masked=any_masked), dq, d_sums.tokens)
    d_carry = d_sums.accumulate_(d_carry, backwards=True)
    fast.weigh_vjp(v, dv, d_sums.tokens, dk, dv)
    return d_carry


def _token_by_token(q: Tensor, k: Tensor, v: Tensor, carry: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk's outputs, and the sums at its end, with a log scale per token."""
    rows = reference.running(*reference.prepended(Pool(scale, carry), k, reference.with_ones(k, v)))
    return q.sigmoid() * reference.mean(rows.sums[..., 1:, :], v.shape[-1]), rows.sums[..., -1:, :]


def _token_by_token_vjp(tokens: list[Tensor], carry: Tensor, scale: Tensor, d_carry: Tensor) -> tuple[Tensor, ...]:
    """The gradients of queries, keys, values and the sums in front of the chunk."""
    q, k, v, g = tokens
    with torch.enable_grad():
        q, k, v, carry = leaves = [x.detach().requires_grad_() for x in (q, k, v, carry.to(k.dtype))]
        results = _token_by_token(q, k, v, carry, scale)
        *gradients, before = torch.autograd.grad(results, leaves, (g, d_carry.to(k.dtype)))
    return *gradients, before.double()


_grouped = Operation(_plain, cpu=Fast(_forward, _backward))


def running_means(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Causal AFT-simple for queries that end where the keys end; zeros before the first key."""
    queries = reference.last_rows(q, k.shape[-2])
    return reference.last_rows(reference.gated_running_means(queries, *fast.hidden(k, v, key_mask)), q.shape[-2])


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    queries, (k, v) = reference.last_rows(q, k.shape[-2]), fast.hidden(k, v, key_mask)
    if key_mask is None and fast.is_short(k):
        trace.record("one cumulative sum in one log scale", "causal, few tokens, and no key far above the first")
        return reference.last_rows(fast.short_causal(queries, k, v), q.shape[-2])
    trace.record("prefix sums over groups of tokens side by side", "causal", group=GROUP)
    return reference.last_rows(_grouped(queries, k, v, any_masked=key_mask is not None), q.shape[-2])


causal = Operation(
    running_means,
    cpu=Fast(_on_cpu, None),
    cuda=Fast(partial(gpu.attend, is_causal=True), None, serves=gpu.serves, halves=True),
    compute=torch.float32,
    empty=like_queries,
    path="running sums with a log scale for every token",
)
