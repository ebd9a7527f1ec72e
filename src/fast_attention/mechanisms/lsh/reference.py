"""The Reformer's formulas: locality-sensitive hashing by random rotations, attention among tokens of like hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks
from fast_attention.engine.blocks import count, join, slices, smaller
from fast_attention.engine.scan import cummax
from fast_attention.engine.tracing import exporting, symbolic

Tokens = Float[Tensor, "*batch heads length width"]
Codes = Int[Tensor, "*batch heads rounds length"]
SMALLEST_BLOCK = 16  # of queries that share one slice of keys
ROTATED = 1 << 22  # numbers at once: more than 16 MiB would be faulted in anew at each call
SHORTEST = 1e-6  # a shorter query is not lengthened to a key of length 1


@dataclass(frozen=True)
class Rules:
    """Which keys count: see ``arrange``; ``number`` buckets, ``scale`` on the logits.

    ``distinct``: a key that is reached in several rounds counts in the first of them only, else in each.
    ``is_causal`` takes tokens of one bucket to reach each other only, as ``ranked`` chunks do: there later in the
    bucket is later in the sequence.
    """

    number: int
    size: int
    ranked: bool
    across: bool
    is_causal: bool
    distinct: bool
    scale: float


def hashed_softmax(q: Tokens, v: Tokens, bucket: Codes, **numbers: Any) -> Tokens:
    """``sum_j exp(s_ij) v_j / sum_j exp(s_ij)``, ``s_ij = scale q_i . q_j / |q_j|``, and v_i where nothing is reached.

    Sums go over the keys that a query reaches in any round, itself left out. Bucket ``rules.number`` holds what is
    masked. Time and memory O(rounds n size). Autograd follows it; ``compiled.py`` computes the same.
    """
    rules = Rules(**numbers)
    arranged = arrange(bucket, number=rules.number, size=rules.size, ranked=rules.ranked, across=rules.across)
    k = F.normalize(q, dim=-1, eps=SHORTEST)
    orders, backs, codes = (x.unbind(-2) for x in arranged)
    sums = []
    for r, (order, back) in enumerate(zip(orders, backs, strict=True)):
        known = codes[0 if rules.distinct else r : r + 1]
        sorted_codes = [permuted(code[..., None], order) for code in known]
        a, b, c = (permuted(x, order) for x in (rules.scale * q, k, v))
        parts = _one_round(a, b, c, sorted_codes, rules)
        sums.append([permuted(part, back) for part in parts])
    numerator, denominator, log_scales = (torch.stack(parts) for parts in zip(*sums, strict=True))
    factor = (log_scales - log_scales.amax(0)).exp()
    denominator = (factor * denominator).sum(0)
    alone = denominator == 0
    return torch.where(alone, v, (factor * numerator).sum(0) / denominator.masked_fill(alone, 1.0))


@torch.no_grad()
def buckets(x: Tokens, rotations: Float[Tensor, "heads rounds width halves"], sizes: tuple[int, ...]) -> Codes:
    """``h(x) = argmax [x R; -x R]`` for each round; several factors make ``h_1 + b_1 h_2 + b_1 b_2 h_3 ...``."""
    heads, rounds, width, halves = rotations.shape
    if not symbolic() and heads > 1 and x.numel() // width * rounds * halves > ROTATED:
        by_head = zip(x.split(1, -3), rotations.split(1), strict=True)
        return torch.cat([buckets(tokens, rotation, sizes) for tokens, rotation in by_head], -3)
    flat = rotations.to(x.dtype).permute(0, 1, 3, 2).reshape(heads, rounds * halves, width)
    rotated = (flat @ x.mT).unflatten(-2, (rounds, halves))  # the sequence last, along which reductions are fast
    bucket, stride = torch.zeros_like(rotated[..., 0, :], dtype=torch.long), 1
    for scores, size in zip(rotated.split([size // 2 for size in sizes], -2), sizes, strict=True):
        half = size // 2
        high, low = scores.amax(-2, keepdim=True), scores.amin(-2, keepdim=True)
        positive = high >= -low
        falling = torch.arange(half, 0, -1, device=x.device, dtype=x.dtype)[:, None]
        hit = scores.eq_(torch.where(positive, high, low))  # 1 or 0 in place of the scores
        first = hit.mul_(falling).amax(-2)  # the first of equal ones is the largest
        best = (half - first).long().clamp_(max=half - 1)
        bucket = bucket + stride * torch.where(positive[..., 0, :], best, best + half)
        stride *= size
    return bucket


class Arranged(NamedTuple):
    """Tokens in the order of their buckets, round by round."""

    order: Codes  # the token at every sorted position
    back: Codes  # the sorted position of every token
    code: Codes  # of each token: i reaches j where code_i - code_j is 0 or 1; at least 2, -1 where masked


@torch.no_grad()
def arrange(bucket: Codes, *, number: int, size: int, ranked: bool, across: bool = False) -> Arranged:
    """Sort by bucket, then by position, and divide into chunks of ``size``; bucket ``number`` holds what is masked.

    ``ranked``: chunks are counted within each bucket, else along the whole sorted sequence. ``across``: tokens of
    neighbouring chunks reach each other whatever their buckets.
    """
    position = torch.arange(bucket.shape[-1], device=bucket.device)
    ascending, order = _stably_sorted(bucket, position)
    chunk = ((ranks(ascending) if ranked else position) // size).expand_as(ascending)
    code = chunk + 2 if across else torch.where(_starts(ascending), 2, chunk - chunk.roll(1, -1)).cumsum(-1)
    code = code.masked_fill(ascending == number, -1).int()
    back = torch.empty_like(order).scatter_(-1, order, position.expand_as(order))
    return Arranged(order, back, code.gather(-1, back))


def _stably_sorted(bucket: Codes, position: Tensor) -> tuple[Codes, Codes]:
    if not exporting():
        ascending, order = bucket.sort(dim=-1, stable=True)
        return ascending, order
    order = (bucket * bucket.shape[-1] + position).argsort(-1)  # ONNX has no stable sort: numbers that all differ
    return bucket.gather(-1, order), order


def _starts(ascending: Codes) -> Bool[Tensor, "..."]:
    return (ascending != ascending.roll(1, -1)) | (torch.arange(ascending.shape[-1], device=ascending.device) == 0)


def ranks(ascending: Codes) -> Codes:
    """How many tokens of the same bucket stand before each, for buckets in ascending order."""
    position = torch.arange(ascending.shape[-1], device=ascending.device)
    return position - cummax(torch.where(_starts(ascending), position, 0), -1)


def permuted(x: Tensor, order: Int[Tensor, "*batch length"]) -> Tensor:
    """The tokens of ``x`` (*batch, L, E) in the given order."""
    return x.gather(-2, order[..., None].expand(*order.shape, x.shape[-1]))


def _one_round(q: Tensor, k: Tensor, v: Tensor, codes: list[Tensor], rules: Rules) -> list[Tensor]:
    """Sums over what the last of ``codes`` (..., L, 1) reaches and none before it, all in the order of the buckets.

    Unnormalised outputs (..., L, Ev), the sums of weights (..., L, 1) and their log scales. The sequence is split into
    blocks of queries, each with the slice of keys that its chunks can lie in.
    """
    size, ranked, is_causal = rules.size, rules.ranked, rules.is_causal
    length = q.shape[-2]
    block = smaller(max(size // 2, min(size, SMALLEST_BLOCK)) if ranked else size, length)
    keys_left = smaller(2 * size - 1 if ranked else size, length - 1)
    keys_right = smaller(size - 1, length - 1) if ranked and not is_causal else 0
    number = count(length, block)

    def queries_of(x: Tensor) -> Tensor:
        return slices(x, block=block, keys_left=0, keys_right=0, number=number)

    def keys_of(x: Tensor) -> Tensor:
        return slices(x, block=block, keys_left=keys_left, keys_right=keys_right, number=number)

    def reached(code: Tensor) -> Tensor:  # masked keys: -3, so that neither a masked query nor padding matches them
        code_q, code_k = queries_of(code), keys_of(code.masked_fill(code < 0, -3)).mT
        return (code_q == code_k) | (code_q == code_k + 1)

    before = masks.band(block, keys_left, keys_right, left=None, right=-1, device=q.device)
    later = ~masks.band(block, keys_left, keys_right, left=None, right=0, device=q.device)
    others = before if is_causal else before | later
    mask = reached(codes[-1]) & others
    for code in codes[:-1]:
        mask = mask & ~reached(code)
    scores = (queries_of(q) @ keys_of(k).mT).masked_fill_(~mask, float("-inf"))
    log_scale = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min)
    weights = (scores - log_scale).exp_()
    parts = (weights @ keys_of(v), weights.sum(-1, keepdim=True), log_scale)
    return [join(part, length) for part in parts]
