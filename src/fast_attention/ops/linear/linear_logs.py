"""Causal sums over positive features that come as logarithms, every feature in a unit of its own.

A query's weight for a key is ``sum_c exp(a_ic + b_jc)``, and its largest term may lie where neither the query nor the
key is large. With B_ic the largest b_jc among the keys that query i sees, it works in units of ``max_c (a_ic + B_ic)``:
no exponent is above zero, the largest term is one, and no later key has a say.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.ops.blocks import join, split
from fast_attention.ops.linear.linear_state import LinearState, Sums, largest_is_one, prefixes, read
from fast_attention.ops.maps.feature_map import Logs
from fast_attention.ops.scan import FLOOR, cummax
from fast_attention.ops.tracing import traced

SLACK = 40.0  # how far above its unit a chunk's feature may be: sums of e^40 and their gradients are numbers in float32


def advance(q: Logs, keys: Logs, v: Tensor, state: LinearState, *, chunk: int) -> tuple[Sums, LinearState]:
    """As ``linear.advance``: masked products inside chunks, prefixes of their states over them."""
    length = v.shape[-2]
    a, b, v = split(q.logs, chunk), split(keys.logs, chunk, value=float("-inf")), split(v, chunk)
    tops = cummax(torch.cat([state.top[..., None, :], b.detach().amax(-2)], -2))
    own = (b - tops[..., 1:, None, :]).exp_()
    kv, k = prefixes(state, own.mT @ v, own.sum(-2), tops)
    before = LinearState(kv[..., :-1, :, :], k[..., :-1, :], tops[..., :-1, :])
    sums = _chunks(a, b, v, before)
    sums = Sums(join(sums.numerator, length), join(sums.denominator[..., None], length)[..., 0])
    return sums, LinearState(kv[..., -1, :, :], k[..., -1, :], tops[..., -1, :])


def alone(q: Logs, keys: Logs, v: Tensor) -> Sums:
    """The same of few tokens in one chunk, with nothing before them and no state after them."""
    return _chunks(q.logs, keys.logs, v, None)


def _chunks(a: Tensor, b: Tensor, v: Tensor, before: LinearState | None) -> Sums:
    """Of chunks (..., n, C), each after a state."""
    top = b.new_full(b[..., 0, :].shape, FLOOR) if before is None else before.top
    level = torch.maximum(top, b.detach()[..., 0, :])
    if _level(level, b.detach().amax(-2)):
        return _by_one_unit(a, b, v, before, level)
    return _by_halves(a, b, v, before, top)


def _level(first: Tensor, last: Tensor) -> bool:
    """Whether the unit of a chunk's first key will do for all; no question where tensors are traced."""
    return not traced() and not bool((last - first > SLACK).any())


def _by_one_unit(a: Tensor, b: Tensor, v: Tensor, before: LinearState | None, level: Tensor) -> Sums:
    """One masked product for each chunk, in units of the largest features up to its first key."""
    queries = largest_is_one(Logs(a), level[..., None, :])
    later = torch.ones(a.shape[-2], a.shape[-2], dtype=torch.bool, device=a.device).triu(1)
    pairs = (queries @ (b - level[..., None, :]).exp_().mT).masked_fill(later, 0.0)
    within = Sums(pairs @ v, pairs.sum(-1))
    return (
        within if before is None else _added(within, read(queries * (before.top - level).exp()[..., None, :], before))
    )


def _by_halves(a: Tensor, b: Tensor, v: Tensor, before: LinearState | None, top: Tensor) -> Sums:
    """Any chunk: the later half of it sees all of the earlier, in whose largest features they meet, and so on inside.

    log2(chunk) products, together half of one for all pairs; then every token with itself.
    """
    size = a.shape[-2]
    missing = (1 << (size - 1).bit_length()) - size
    a, v = (F.pad(x, (0, 0, 0, missing)) for x in (a, v))
    b = F.pad(b, (0, 0, 0, missing), value=float("-inf"))
    largest = torch.maximum(cummax(b.detach()), top[..., None, :])
    unit = (a.detach() + largest).amax(-1, keepdim=True)
    itself, half = (a + b - unit).exp_().sum(-1), 1
    sums = Sums(itself[..., None] * v, itself)
    if before is not None:
        sums = _added(sums, read((a + top[..., None, :] - unit).exp_(), before))
    while half < a.shape[-2]:
        (keys, _), (_, queries), (values, _) = (_halves(x, half) for x in (b, a, v))
        meeting, own = _halves(largest, half)[0][..., -1:, :], _halves(unit, half)[1]
        pairs = (queries + meeting - own).exp_() @ (keys - meeting).exp_().mT
        sums = _added(sums, Sums(_later(pairs @ values), _later(pairs.sum(-1, keepdim=True))[..., 0]))
        half *= 2
    return Sums(sums.numerator[..., :size, :], sums.denominator[..., :size])


def _added(a: Sums, b: Sums) -> Sums:
    return Sums(a.numerator + b.numerator, a.denominator + b.denominator)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The earlier and later halves of a chunk's pieces of two halves, (pieces, ..., chunks, half, E).

    The pieces come first, or a product over a number of chunks left open would be one over a multiple of it.
    """
    earlier, later = x.unflatten(-2, (x.shape[-2] // (2 * half), 2, half)).movedim(-4, 0).unbind(-3)
    return earlier, later


def _later(x: Tensor) -> Tensor:
    """The sequence that has ``x`` in its later halves, zeros in the earlier."""
    return F.pad(x[..., None, :, :], (0, 0, 0, 0, 1, 0)).movedim(0, -4).flatten(-4, -2)
