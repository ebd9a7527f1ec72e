"""Causal sums over positive features that come as logarithms, every feature with a scale of its own.

A query's weight for a key is ``sum_c exp(a_ic + b_jc)``, and its largest term may lie where neither the query nor the
key is large. With B_ic the largest b_jc among the keys that query i sees, its sums are divided by e to the power of
``max_c (a_ic + B_ic)``: no exponent is above zero, the largest term is one, and no later key counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine.blocks import join, smaller, split
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.tracing import traced
from fast_attention.feature_maps.feature_map import Logs
from fast_attention.mechanisms.linear.linear_state import LinearState, Sums, largest_is_one, prefixes

SLACK = 40.0  # how far above its log scale a feature may be: sums of e^40 and their gradients are numbers in float32
CHUNK = 64  # tokens of a chunk whose pairs are taken by halves


def advance(q: Logs, keys: Logs, v: Tensor, state: LinearState, *, chunk: int) -> tuple[Sums, LinearState]:
    """Causal outputs behind a state: pairs inside chunks, prefixes of their states over them.

    Where no chunk's keys rise far above its first one, pairs are one product, in that key's scale. Traced code, which
    may not ask what the numbers are, takes them by halves.
    """
    length = v.shape[-2]
    b = split(keys.logs, chunk, value=float("-inf"))
    highest = b.detach().amax(-2)
    log_scales = cummax(torch.cat([state.log_scale[..., None, :], highest], -2))
    scale = torch.maximum(log_scales[..., :-1, :], b.detach()[..., 0, :])  # what the first query of a chunk sees
    if traced() or bool((highest - scale > SLACK).any()):
        chunk = 1 << (smaller(min(chunk, CHUNK), length) - 1).bit_length()
        b = split(keys.logs, chunk, value=float("-inf"))
        log_scales = cummax(torch.cat([state.log_scale[..., None, :], b.detach().amax(-2)], -2))
        scale = None
    a, values, before = split(q.logs, chunk), split(v, chunk), log_scales[..., :-1, None, :]
    scaled = (b - log_scales[..., 1:, None, :]).exp_()
    kv, k = prefixes(state, scaled.mT @ values, scaled.sum(-2), log_scales)
    if scale is None:
        seen = torch.maximum(cummax(b.detach()), before)
        top = (a.detach() + seen).amax(-1, keepdim=True)
        pairs, queries = pairs_by_halves(a, b, top), (a + before - top).exp()
    else:
        queries, pairs = _in_one_scale(a, b, scale)
        queries = queries * (before - scale[..., None, :]).exp()
    numerator = join(pairs @ values + queries @ kv[..., :-1, :, :], length)
    denominator = pairs.sum(-1, keepdim=True) + queries @ k[..., :-1, :, None]
    return Sums(numerator, join(denominator, length)[..., 0]), LinearState(
        kv[..., -1, :, :], k[..., -1, :], log_scales[..., -1, :]
    )


def one_chunk(q: Logs, keys: Logs, v: Tensor) -> Sums | None:
    """Sums of a sequence that is one chunk, without a state; None where its keys rise far above the first one."""
    scale = keys.logs.detach()[..., 0, :].clamp_min(FLOOR)
    if bool((keys.logs.detach().amax(-2) - scale > SLACK).any()):
        return None
    _, pairs = _in_one_scale(q.logs, keys.logs, scale)
    return Sums(pairs @ v, pairs.sum(-1))


def _in_one_scale(a: Tensor, b: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Features of queries over their largest terms, and their pairs with keys over ``e^scale``."""
    queries = largest_is_one(Logs(a), scale[..., None, :])
    return queries, (queries @ (b - scale[..., None, :]).exp_().mT).tril()


def pairs_by_halves(a: Tensor, b: Tensor, top: Tensor, q: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """``sum_c q_ic k_jc exp(a_ic + b_jc - top_i)`` for j <= i, else 0, for a power of two of tokens; q, k may be ones.

    The second half of the queries sees the whole first half of the keys: in the scale of its largest b_jc their pairs
    are a product, and no exponent is above zero where ``a_ic + b_jc <= top_i`` for j <= i. Triangles fall into such
    squares by halving, down to single tokens. All have as many axes; a, b and ``top`` may be of higher precision than q
    and k. Halves come before all axes, or a product over chunks left open would be one over a multiple of them.
    """
    size = a.shape[-2]
    if size == 1:
        return _times(q, _times(k, (a + b - top).exp())).sum(-1, keepdim=True)
    half = size // 2
    halves: Any = [None if x is None else x.unflatten(-2, (2, half)).movedim(-3, 0) for x in (a, b, top, q, k)]
    first, second = pairs_by_halves(*halves)
    a, top, b = a[..., half:, :], top[..., half:, :], b[..., :half, :]
    q, k = None if q is None else q[..., half:, :], None if k is None else k[..., :half, :]
    largest = b.detach().amax(-2, keepdim=True).clamp_min(FLOOR)
    square = _times(q, (a + largest - top).exp()) @ _times(k, (b - largest).exp()).mT
    upper = torch.cat([first, torch.zeros_like(first)], -1)
    return torch.cat([upper, torch.cat([square, second], -1)], -2)


def _times(x: Tensor | None, factor: Tensor) -> Tensor:
    return factor if x is None else x * factor.to(x.dtype)
