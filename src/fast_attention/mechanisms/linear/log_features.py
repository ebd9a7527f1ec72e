"""Causal sums over positive features that come as logarithms, every feature with a scale of its own.

A query's weight for a key is ``sum_c exp(a_ic + b_jc)``, and its largest term may lie where neither the query nor the
key is large. With B_ic the largest b_jc among the keys that query i sees, its sums are divided by e to the power of
``max_c (a_ic + B_ic)``: no exponent is above zero, the largest term is one, and no later key counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine.blocks import join, split
from fast_attention.engine.operation import Operation
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.tracing import traced
from fast_attention.feature_maps.feature_map import Logs
from fast_attention.mechanisms.linear.linear_state import LinearState, Sums, largest_is_one, prefixes, read

SLACK = 40.0  # how far above its log scale a feature may be: sums of e^40 and their gradients are numbers in float32
FEW = 16  # neighbours whose pairs are taken feature by feature
CHUNK = 64  # tokens of a chunk where all are taken so: four groups of FEW, each with log scales of its own


def advance(q: Logs, keys: Logs, v: Tensor, state: LinearState, *, chunk: int) -> tuple[Sums, LinearState]:
    """Causal outputs behind a state: products inside chunks, prefixes of their states over them.

    Traced code, which may not ask what the numbers are, takes all chunks feature by feature.
    """
    numerator, denominator, *after = _CHUNKS(q.logs, keys.logs, v, *state, chunk=chunk)
    return Sums(numerator, denominator), LinearState(*after)


def _parts(
    a: Tensor, b: Tensor, v: Tensor, kv: Tensor, k: Tensor, log_scale: Tensor, *, chunk: int
) -> tuple[Tensor, ...]:
    sums, state = _advance(Logs(a), Logs(b), v, LinearState(kv, k, log_scale), chunk, by_feature=traced())
    return *sums, *state


def _empty(
    a: Tensor, b: Tensor, v: Tensor, kv: Tensor, k: Tensor, log_scale: Tensor, *, chunk: int
) -> tuple[Tensor, ...]:
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (a, b, v)))
    sums = v.new_empty(*lead, *v.shape[-2:]), v.new_empty(*lead, v.shape[-2])
    state = (
        v.new_empty(*lead, *kv.shape[-2:]),
        v.new_empty(*lead, k.shape[-1]),
        v.new_empty(*lead, log_scale.shape[-1]),
    )
    return *sums, *state


_CHUNKS = Operation(_parts, empty=_empty)


def one_chunk(q: Logs, keys: Logs, v: Tensor) -> Sums | None:
    """Sums of a sequence that is one chunk, without a state; None if one scale for each feature will not do."""
    a, b = q.logs, keys.logs
    scale = b.detach()[..., 0, :].clamp_min(FLOOR)
    return None if bool(_out_of_range(scale, b.detach().amax(-2)).any()) else _by_one_scale(a, b, v, None, scale)


def _advance(
    q: Logs, keys: Logs, v: Tensor, state: LinearState, chunk: int, *, by_feature: bool
) -> tuple[Sums, LinearState]:
    length, size = v.shape[-2], min(chunk, CHUNK) if by_feature else chunk
    a, b, values = split(q.logs, size), split(keys.logs, size, value=float("-inf")), split(v, size)
    highest = b.detach().amax(-2)
    log_scales = cummax(torch.cat([state.log_scale[..., None, :], highest], -2))
    scale = log_scales[..., :-1, :]
    if not by_feature:
        scale = torch.maximum(scale, b.detach()[..., 0, :])
        out_of_range = _out_of_range(scale, highest)
        if bool(out_of_range.any()):
            return _one_by_one(q, keys, v, state, chunk, out_of_range)
    scaled = (b - log_scales[..., 1:, None, :]).exp_()
    kv, k = prefixes(state, scaled.mT @ values, scaled.sum(-2), log_scales)
    before = LinearState(kv[..., :-1, :, :], k[..., :-1, :], log_scales[..., :-1, :])
    sums = _by_feature(a, b, values, before) if by_feature else _by_one_scale(a, b, values, before, scale)
    sums = Sums(join(sums.numerator, length), join(sums.denominator[..., None], length)[..., 0])
    return sums, LinearState(kv[..., -1, :, :], k[..., -1, :], log_scales[..., -1, :])


def _out_of_range(first: Tensor, last: Tensor) -> Tensor:
    """Where the scale of a chunk's first key will not do for all its keys."""
    return last - first > SLACK


def _one_by_one(
    q: Logs, keys: Logs, v: Tensor, state: LinearState, chunk: int, out_of_range: Tensor
) -> tuple[Sums, LinearState]:
    """Chunk after chunk, those that are ``out_of_range`` (..., chunks, C) feature by feature."""
    parts = []
    for index, by_feature in enumerate(out_of_range.any(-1).reshape(-1, out_of_range.shape[-2]).any(0).tolist()):
        at = slice(index * chunk, (index + 1) * chunk)
        tokens = Logs(q.logs[..., at, :]), Logs(keys.logs[..., at, :]), v[..., at, :]
        sums, state = _advance(*tokens, state, chunk, by_feature=by_feature)
        parts.append(sums)
    numerators, denominators = zip(*parts, strict=True)
    return Sums(torch.cat(numerators, -2), torch.cat(denominators, -1)), state


def _by_one_scale(a: Tensor, b: Tensor, v: Tensor, before: LinearState | None, scale: Tensor) -> Sums:
    """One masked product for each chunk, over the largest features up to its first key."""
    queries = largest_is_one(Logs(a), scale[..., None, :])
    pairs = (queries @ (b - scale[..., None, :]).exp_().mT).masked_fill(_later(a), 0.0)
    within = Sums(pairs @ v, pairs.sum(-1))
    return (
        within
        if before is None
        else _added(within, read(queries * (before.log_scale - scale).exp()[..., None, :], before))
    )


def _by_feature(a: Tensor, b: Tensor, v: Tensor, before: LinearState) -> Sums:
    """Any chunks (..., n, C), divided by the query's largest term: all pairs of ``FEW`` neighbours, every feature by
    itself, a sum over exponentials that a compiler does not store; with the keys of earlier groups of as many in
    the chunk, and with the state, they meet in the largest features so far.
    """
    queries, near, values = _groups(a), _groups(b, float("-inf")), _groups(v)
    earlier = near.detach().amax(-2)[:-1].movedim(0, -2)
    log_scales = cummax(torch.cat([before.log_scale[..., None, :], earlier], -2)).movedim(-2, 0)[..., None, :]
    terms = queries[..., :, None, :] + near[..., None, :, :]
    terms = terms.masked_fill(_later(queries)[..., None], float("-inf"))
    largest = torch.maximum(terms.detach().amax((-1, -2)), (queries.detach() + log_scales).amax(-1))[..., None]
    pairs, queries = (terms - largest[..., None]).exp().sum(-1), (queries + log_scales - largest).exp()
    group = torch.arange(near.shape[0], device=a.device).view(-1, *[1] * b.ndim)
    ahead = torch.arange(b.shape[-2], device=a.device)[:, None] >= FEW * group
    far = queries @ (b - log_scales).masked_fill(ahead, float("-inf")).exp().mT
    numerator, denominator = pairs @ values + far @ v, pairs.sum(-1) + far.sum(-1)
    queries = queries * (before.log_scale[..., None, :] - log_scales).exp()
    numerator, denominator, queries = (
        join(x.movedim(0, -3), a.shape[-2]) for x in (numerator, denominator[..., None], queries)
    )
    return _added(Sums(numerator, denominator[..., 0]), read(queries, before))


def _groups(x: Tensor, value: float = 0.0) -> Tensor:
    """Chunks (..., N, n, E) in groups (n / FEW, ..., N, FEW, E).

    The groups come first, or a product over a number of chunks left open would be one over a multiple of it.
    """
    return split(x, FEW, value=value).movedim(-3, 0)


def _later(chunks: Tensor) -> Tensor:
    """True where column j of a chunk's pairs comes after row i."""
    return torch.ones(chunks.shape[-2], chunks.shape[-2], dtype=torch.bool, device=chunks.device).triu(1)


def _added(a: Sums, b: Sums) -> Sums:
    return Sums(a.numerator + b.numerator, a.denominator + b.denominator)
