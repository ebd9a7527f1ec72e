"""AFT-simple over all keys and causal, with hand-written gradients or by kernels; what AFT's fast forms share.

``sigmoid(q_i) * sum_j exp(k_j) v_j / sum_j exp(k_j)`` in chunks that stay in cache; the weights are computed again in
the backward pass. Masked keys are ``scan.FLOOR`` and their values zeros.

A causal chunk has one log scale, the running maximum at its end, as long as no query of it has seen only keys far below
that: then every denominator is an ordinary number, and plain sums are exact. Any other chunk takes a log scale per
token (``reference.running``). One row of sums, in float64, is carried from chunk to chunk. Inside a chunk tokens lie in
groups of ``GROUP``: row t of all groups is contiguous, and prefix sums are ``GROUP`` - 1 additions of such rows, then
the same over the groups' ends by one cumulative sum.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine import masks, operation
from fast_attention.engine.chunks import RunningSum, chunks_of
from fast_attention.engine.numerics import exp_
from fast_attention.engine.operation import Fast, Operation, Tensors, like_queries
from fast_attention.engine.scan import FLOOR
from fast_attention.gpu import calls, self_check
from fast_attention.gpu.calls import Chunks
from fast_attention.gpu.pooling import operations as pooling
from fast_attention.mechanisms.aft import reference
from fast_attention.mechanisms.aft.reference import Pool, last_rows

NUMBERS = 1 << 19  # of one operand that are worked on at a time: a few such operands fit the caches
GROUP = 16
SHORT = 256  # tokens up to which fewer calls count more than sums side by side
RANGE = 60.0  # the natural logarithm of the smallest sum that a log scale may leave; float32 ends at 87


def chunk_length(x: Tensor, multiple: int = 1) -> int:
    """Tokens, a multiple of ``multiple``, that make about ``NUMBERS`` numbers in all sequences together."""
    per_token = max(1, x.numel() // max(1, x.shape[-2]))
    return max(1, NUMBERS // (per_token * multiple)) * multiple


def log_scale(k: Tensor) -> Tensor:
    """The largest key of every channel (..., 1, D): above every masked one, also where all are masked."""
    return k.amax(-2, keepdim=True).clamp_(min=FLOOR / 2)


def smallest(k: Tensor) -> Tensor:
    """The smallest visible key of every channel (..., D); infinite where none is."""
    return k.masked_fill(k < FLOOR / 2, float("inf")).amin(-2)


def safe(denominators: Tensor, *, any_masked: bool) -> Tensor:
    """Denominators, in place, infinite where no key is visible (``any_masked``: possible): quotients become zero."""
    return denominators.masked_fill_(denominators == 0, float("inf")) if any_masked else denominators


def weigh(k: Tensor, v: Tensor, scale: Tensor, out: Tensor) -> None:
    """``exp(k - scale)`` times values and ones, into ``out`` (..., S, 2 D)."""
    numerators, denominators = out.split(v.shape[-1], -1)
    torch.mul(exp_(torch.sub(k, scale, out=denominators)), v, out=numerators)


def weigh_vjp(v: Tensor, weights: Tensor, d_terms: Tensor, dk: Tensor, dv: Tensor) -> None:
    """The gradients of ``weigh`` into ``dk`` and ``dv``, which may hold the weights."""
    d_numerators, d_denominators = d_terms.split(v.shape[-1], -1)
    torch.mul(v, d_numerators, out=dk).add_(d_denominators).mul_(weights)
    torch.mul(weights, d_numerators, out=dv)


def gate(q: Tensor, sums: Tensor, out: Tensor, *, any_masked: bool) -> Tensor:
    """``sigmoid(q)`` times numerators over denominators, into ``out``; returns the denominators."""
    numerators, denominators = sums.split(q.shape[-1], -1)
    torch.sigmoid(q, out=out).mul_(numerators).div_(safe(denominators, any_masked=any_masked))
    return denominators


def gate_vjp(q: Tensor, g: Tensor, out: Tensor, denominators: Tensor, dq: Tensor, d_sums: Tensor) -> None:
    """The gradients of ``gate`` into ``dq`` and ``d_sums``."""
    d_numerators, d_denominators = d_sums.split(q.shape[-1], -1)
    torch.sigmoid(q, out=dq)
    torch.div(g, denominators, out=d_denominators)
    torch.mul(d_denominators, dq, out=d_numerators)
    d_denominators.mul_(out).neg_()
    dq.neg_().add_(1.0).mul_(out).mul_(g)


def mean_of_all(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """AFT-simple over all visible keys."""
    k, v = hidden(k, v, key_mask)
    return q.sigmoid() * reference.mean(reference.pooled(k, reference.with_ones(k, v)).sums, v.shape[-1])


def hidden(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values, at ``FLOOR`` and zero where masked."""
    return reference.masked_scores(k, key_mask), masks.drop(v, key_mask)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (k, v), any_masked = hidden(k, v, key_mask), key_mask is not None
    scale, size = log_scale(k), chunk_length(k)
    if size >= k.shape[-2]:
        e = (k - scale).exp_()
        denominator = e.sum(-2, keepdim=True)
        mean = e.mul_(v).sum(-2, keepdim=True)
    else:
        mean, denominator = _sums(k, v, scale, size)
    denominator = safe(denominator, any_masked=any_masked)
    mean = mean.div_(denominator)
    if q.shape[-2] <= (size := chunk_length(q)):
        return q.sigmoid().mul_(mean), (scale, denominator, mean) if keep else ()
    out = torch.empty_like(q)
    for at in chunks_of(size, q.shape[-2]):
        torch.sigmoid(q[..., at, :], out=out[..., at, :]).mul_(mean)
    return out, (scale, denominator, mean) if keep else ()


def _sums(k: Tensor, v: Tensor, scale: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Numerators and denominators."""
    e = k.new_empty(*k.shape[:-2], size, k.shape[-1])
    numerator, denominator = RunningSum(), RunningSum()
    for at in chunks_of(size, k.shape[-2]):
        weights = exp_(torch.sub(k[..., at, :], scale, out=e[..., : at.stop - at.start, :]))
        denominator.add(weights)
        numerator.add(weights.mul_(v[..., at, :]))
    return numerator.row(k), denominator.row(k)


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> Tensors:
    (q, k, v, key_mask), (scale, denominator, mean), (g,) = inputs, saved, gradients
    k, v = hidden(k, v, key_mask)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    total = torch.zeros_like(mean, dtype=torch.float64)
    for at in chunks_of(chunk_length(q), q.shape[-2]):
        gates, rows = torch.sigmoid(q[..., at, :]), dq[..., at, :]
        total += torch.mul(gates, g[..., at, :], out=rows).sum(-2, keepdim=True)
        rows.mul_(mean).mul_(gates.neg_().add_(1.0))  # out = gates * mean
    factor = total.to(k.dtype) / denominator
    for at in chunks_of(chunk_length(k), k.shape[-2]):
        weights = exp_(torch.sub(k[..., at, :], scale, out=dv[..., at, :])).mul_(factor)
        torch.sub(v[..., at, :], mean, out=dk[..., at, :]).mul_(weights)
    return dq, masks.drop(dk, key_mask), masks.drop(dv, key_mask), None


TOKENS = 64  # of a chunk of packed sequences
WIDEST = 1 << 16  # channels: any number, which a program takes a few of


def gpu_serves(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> str:
    """Why kernels cannot compute this call; empty where they can."""
    why = operation.gpu_unsupported_reason(q, k, v, widest=WIDEST)
    return why or self_check.unsupported_reason(self_check.pools(), q, v, masked=key_mask is not None)


def attend_on_gpu(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Outputs (..., L, C): see ``aft_simple``."""
    kernel_set = pooling.kernel_set(gated=True)
    return calls.run(kernel_set, q, k, v, key_mask, is_causal=is_causal)


def packed_on_gpu(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], key_mask: Tensor | None) -> Tensor:
    """Causal outputs of sequences of so many tokens, one behind another."""
    parts = Chunks.of(lengths, TOKENS, q.device)
    kernel_set = pooling.kernel_set(gated=True, begins=parts.begins)
    q, k, v = (parts.spread(x) for x in (q, k, v))
    return parts.gathered(calls.run(kernel_set, q, k, v, parts.visible(key_mask), is_causal=True))


def advance_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Pool | None
) -> tuple[Tensor, Pool]:  # fmt: skip
    """Outputs of new tokens behind ``state``, and the pool after them."""
    first = None if state is None else torch.cat([state.log_scale, state.sums], -1)[..., 0, :]
    kernel_set = pooling.kernel_set(gated=True)
    out, last = calls.advance(kernel_set, q, k, v, key_mask, first, decodes=calls.steps(q, k, v, first))
    return out, Pool(last[..., None, : k.shape[-1]], last[..., None, k.shape[-1] :])


noncausal = Operation(
    mean_of_all,
    cpu=Fast(
        _forward, _backward, path="sums over all keys, chunk by chunk", why="every query sees the same keys"
    ),
    cuda=Fast(partial(attend_on_gpu, is_causal=False), None, serves=gpu_serves, halves=True),
    compute=torch.float32,
    path="sums over all keys",
)  # fmt: skip


class Chunk(NamedTuple):
    """Tokens, whether one log scale serves them, and the size of the groups in which they are summed."""

    at: slice
    one_scale: bool
    group: int


def chunks(k: Tensor, *, any_masked: bool) -> tuple[list[Chunk], Tensor]:
    """The chunks, and the log scale at the end of each, (..., 1 + chunks, D), the first one ``FLOOR / 2``."""
    length = k.shape[-2]
    size, grouped = chunk_length(k, GROUP), length // GROUP * GROUP
    ends = sorted({*range(0, grouped, size), grouped, length})
    keys = [k[..., a:b, :] for a, b in itertools.pairwise(ends)]
    low = torch.stack([smallest(x) if any_masked else x[..., 0, :] for x in keys], -2)
    scales = torch.stack([k.new_full(low[..., 0, :].shape, FLOOR / 2), *(x.amax(-2) for x in keys)], -2)
    scales = scales.cummax(-2).values
    rise = scales[..., 1:, :] - torch.maximum(scales[..., :-1, :], low)
    one_scale = (rise <= RANGE).movedim(-2, 0).flatten(1).all(-1).tolist()
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


def _is_short(k: Tensor, key_mask: Tensor | None) -> bool:
    """Whether all keys (..., S, D) are visible and few, and the first of every channel lies near the largest."""
    if key_mask is not None or k.shape[-2] > SHORT:
        return False
    return bool((k.detach().amax(-2) - k.detach()[..., 0, :]).amax() <= RANGE)


def _short_forward(q: Tensor, k: Tensor, v: Tensor, *, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    scale, terms = log_scale(k), k.new_empty(*k.shape[:-1], 2 * v.shape[-1])
    weigh(k, v, scale, terms)
    numerators, denominators = terms.cumsum(-2).split(v.shape[-1], -1)
    return q.sigmoid().mul_(numerators).div_(denominators), (scale, denominators) if keep else ()


def _short_backward(tensors: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (q, k, v, g, out), (scale, denominators) = tensors, saved
    dq, d_sums = torch.empty_like(q), g.new_empty(*g.shape[:-1], 2 * v.shape[-1])
    gate_vjp(q, g, out, denominators, dq, d_sums)
    d_numerators, d_denominators = d_sums.flip(-2).cumsum(-2).flip(-2).split(v.shape[-1], -1)
    weights = exp_(k - scale)
    dk = torch.addcmul(d_denominators, v, d_numerators).mul_(weights)
    return dq, dk, weights.mul_(d_numerators)


def _grouped_forward(
    q: Tensor, k: Tensor, v: Tensor, *, keep: bool, any_masked: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
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
        weigh(keys, values, scale[..., None, :], sums.tokens)
        carry = sums.accumulate_(carry * _decay(before, scale))
        gate(queries, sums.tokens, rows, any_masked=any_masked)
    return out, (scales, torch.cat(carries, -2)) if keep else ()


def _grouped_backward(
    tensors: tuple[Tensor, ...], saved: tuple[Tensor, ...], *, any_masked: bool
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values; ``tensors`` are these, the gradient of the outputs, and the outputs."""
    scales, carries = saved
    d_inputs = [torch.empty_like(x) for x in tensors[:3]]
    d_carry = torch.zeros_like(carries[..., :1, :])  # the gradient of the sums at the end of the chunk
    for i, chunk in reversed(list(enumerate(chunks(tensors[1], any_masked=any_masked)[0]))):
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
    gate_vjp(q, g, out, safe(denominators.tokens, any_masked=any_masked), dq, d_sums.tokens)
    d_carry = d_sums.accumulate_(d_carry, backwards=True)
    weigh_vjp(v, dv, d_sums.tokens, dk, dv)
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


def running_means(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Causal AFT-simple for queries that end where the keys end; zeros before the first key."""
    queries, (k, v) = last_rows(q, k.shape[-2]), hidden(k, v, key_mask)
    means = reference.mean(reference.running(k, reference.with_ones(k, v)).sums, v.shape[-1])
    return last_rows(queries.sigmoid() * means, q.shape[-2])


def _causal_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    queries, (k, v) = last_rows(q, k.shape[-2]), hidden(k, v, key_mask)
    if _is_short(k, key_mask):
        out, saved = _short_forward(queries, k, v, keep=keep)
    else:
        out, saved = _grouped_forward(queries, k, v, keep=keep, any_masked=key_mask is not None)
    return last_rows(out, q.shape[-2]), saved


def _causal_backward(
    inputs: tuple[Any, ...], outputs: tuple[Any, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> Tensors:
    q, k, v, key_mask = inputs
    queries, grad, out = (last_rows(x, k.shape[-2]) for x in (q, *gradients, *outputs))
    tensors = queries, *hidden(k, v, key_mask), grad, out
    if saved[0].shape[-2] == 1:  # one log scale
        dq, dk, dv = _short_backward(tensors, saved)
    else:
        dq, dk, dv = _grouped_backward(tensors, saved, any_masked=key_mask is not None)
    return last_rows(dq, q.shape[-2]), masks.drop(dk, key_mask), masks.drop(dv, key_mask), None


def _causal_path(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> str:
    if _is_short(k, key_mask):
        return "one cumulative sum in one log scale"
    return "prefix sums over groups of tokens side by side"


def _causal_why(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> str:
    return "causal, few tokens, and no key far above the first" if _is_short(k, key_mask) else "causal"


causal = Operation(
    running_means,
    cpu=Fast(
        _causal_forward,
        _causal_backward,
        path=_causal_path,
        why=_causal_why,
        sizes=lambda q, k, v, key_mask: {} if _is_short(k, key_mask) else {"group": GROUP},
    ),
    cuda=Fast(partial(attend_on_gpu, is_causal=True), None, serves=gpu_serves, halves=True),
    compute=torch.float32,
    empty=like_queries,
    path="running sums with a log scale for every token",
)
